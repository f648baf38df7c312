"""Thousands of requests that are almost right, to one server: it answers each with 2xx or 4xx, and still works.

python -m tests.campaigns.fuzz --count 5000 --seed 1
"""

from __future__ import annotations

import argparse
import functools
import http.client
import logging
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import torch
from transformers.utils import logging as transformers_logging

from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.wire import GenerateRequest, GenerateResponse, Sampling, ServerInfo
from tests.campaigns.mutations import Generator, Request
from tests.support.adapters import publish_random
from tests.support.live_server import LiveServer, live_server
from tests.support.tiny_model import make_tiny_model

ANSWER_S = 60.0
CHECK_EVERY = 25
MAX_PROBLEMS = 20


@dataclass
class Summary:
    """What became of `count` requests. problems: one text each, empty when all is well."""

    seed: int
    count: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    num_checks: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        answers = ", ".join(f"{number} x {status or 'closed'}" for status, number in sorted(self.statuses.items()))
        return f"seed {self.seed}: {answers}; {self.num_checks} right requests in between were answered rightly"


def run(server: LiveServer, count: int, seed: int, *, publish: Callable[[str, int], str] | None = None) -> Summary:
    """Send `count` requests, a right one after every `CHECK_EVERY`, and stop early when too much went wrong.

    publish: `(run_id, version) -> digest`, makes an adapter that the server can load.
    """
    summary = Summary(seed)
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=ANSWER_S) as client:
        info = ServerInfo.model_validate_json(client.get("/server_info/").raise_for_status().content)
        fingerprint = info.fingerprint.model_dump()
        generator = Generator(seed, server.token, fingerprint, functools.cache(publish) if publish else None)
        expected = _right_answer(client)
        for number in range(1, count + 1):
            request = generator.next()
            _send(server.url, request, summary)
            summary.count = number
            if number % CHECK_EVERY == 0 or number == count:
                answer = _right_answer(client)
                if answer != expected:
                    summary.problems.append(f"request {number}: the right request after it was answered {answer!r}")
                summary.num_checks += 1
            if len(summary.problems) >= MAX_PROBLEMS:
                break
    # On a connection of its own: after a bug in an answer the server closes the one it came on.
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=ANSWER_S) as client:
        _release(client)
    return summary


def _release(client: httpx.Client) -> None:
    """Give up what a mutated claim took: the server would keep it until the lease is over."""
    info = ServerInfo.model_validate_json(client.get("/server_info/").raise_for_status().content)
    if info.run_id is not None:
        body = {"run_id": info.run_id, "host": "elsewhere", "pid": 1, "fingerprint": info.fingerprint.model_dump()}
        client.post("/session/", json={**body, "action": "release"}).raise_for_status()


def _send(url: str, request: Request, summary: Summary) -> None:
    summary.kinds[request.kind] += 1
    try:
        status = _exchange(url, request)
    except TimeoutError:
        status = -1
    summary.statuses[status] += 1
    is_fine = 200 <= status < 300 or 400 <= status < 500 or (status == 0 and not request.is_whole)
    if not is_fine:
        summary.problems.append(f"{request.kind}: answered {status} to {_shown(request.raw)}")


def _shown(raw: bytes) -> str:
    head, _, body = raw.partition(b"\r\n\r\n")
    return f"{head.splitlines()[:1]!r} ... {body[:600]!r}"


def _exchange(url: str, request: Request) -> int:
    """The status of the answer, 0 when the connection was closed without one."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), ANSWER_S) as connection:
        try:
            connection.sendall(request.raw)
            if not request.is_whole:
                connection.shutdown(socket.SHUT_WR)
            reply = http.client.HTTPResponse(connection, method=request.method)
            reply.begin()
            reply.read()
        except (ConnectionError, http.client.HTTPException):
            return 0
        return reply.status


def _right_answer(client: httpx.Client) -> object:
    """What one fixed request is answered: the tokens, or whatever came instead of them."""
    request = GenerateRequest(
        request_id="right",
        adapter_version=0,
        prompts=[[5, 6, 7, 8], [9, 10]],
        sampling=Sampling(n=2, max_tokens=5),
        seeds=[[1, 2], [3, 4]],
    )
    reply = client.post("/generate/", content=request.model_dump_json(), headers={"content-type": "application/json"})
    if reply.status_code != 200:
        return reply.status_code, reply.text
    answer = GenerateResponse.model_validate_json(reply.content)
    return [[(c.ids, c.finish_reason) for c in group.completions] for group in answer.groups]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    arguments = parser.parse_args()
    print(f"fuzzing with --seed {arguments.seed}", flush=True)
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        summary = run_on_tiny_model(Path(directory), arguments.count, arguments.seed)
    for problem in summary.problems:
        print(problem)
    print(summary)
    took = f"in {time.monotonic() - started:.0f} s"
    print(f"{summary.count} requests {took}, {len(summary.problems)} problems")
    return bool(summary.problems)


def run_on_tiny_model(directory: Path, count: int, seed: int) -> Summary:
    """Against a server with the transformers engine, made for it."""
    torch.set_num_threads(1)
    model, sync_dir = make_tiny_model(directory / "model"), directory / "sync"
    settings = EngineSettings(
        model=str(model),
        revision=None,
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_lora_rank=8,
        max_loras=3,
    )
    with live_server(sync_dir, functools.partial(TransformersEngine.create, settings)) as server:
        return run(
            server, count, seed, publish=lambda run_id, version: publish_random(sync_dir, run_id, version, model)
        )


if __name__ == "__main__":
    sys.exit(main())
