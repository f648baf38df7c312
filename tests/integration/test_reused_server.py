"""Ten runs in a row on one server equal ten fresh servers: the transformers engine with a tiny random model."""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
import torch

from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.fingerprint import fingerprint
from tests.support.adapters import publish_other_weights, publish_random
from tests.support.live_server import LiveServer, live_server
from tests.support.protocol_suite import generate_request, ids_of
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_RUNS = 10
FULL_WEIGHTS = (3, 7)
"""The runs that push full weights; the others push adapters."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def serve(model: Path, sync_dir: Path) -> AbstractContextManager[LiveServer]:
    settings = EngineSettings(
        model=str(model),
        revision=None,
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_lora_rank=8,
        max_loras=3,
    )
    return live_server(sync_dir, functools.partial(TransformersEngine.create, settings))


def test_ten_runs_in_a_row_equal_ten_fresh_servers(model: Path, tmp_path: Path) -> None:
    """Each run pushes versions 1 and 2, with contents of its own, and asks every version the same prompts."""
    fresh = []
    for number in range(NUM_RUNS):
        with serve(model, tmp_path / f"fresh-{number}") as server:
            fresh.append(one_run(server, model, number))
    with serve(model, tmp_path / "reused") as server:
        reused = [one_run(server, model, number) for number in range(NUM_RUNS)]
    assert reused == fresh
    assert all(run[0] == fresh[0][0] for run in fresh), "the base model is the same for all"
    pushed = [tokens for run in fresh for tokens in run[1:]]
    assert all(first != second for first, second in itertools.combinations(pushed, 2)), "each version is seen"


def one_run(server: LiveServer, model: Path, number: int) -> list[list[list[list[int]]]]:
    """Claim, push, generate; `[version][prompt][completion]` token ids. Every second run ends without a release."""
    run_id = f"run-{uuid.uuid4().hex[:12]}"
    answers = []
    with server.client() as client:
        client.wait_ready()
        client.claim(run_id, fingerprint(str(model), None, False))
        for version in (0, 1, 2):
            if version:
                push(server, run_id, model, version, seed=10 * number + version, is_full=number in FULL_WEIGHTS)
            answers.append(ids_of(client.generate(generate_request(adapter_version=version, max_tokens=24))))
        if number % 2:
            client.release()
    return answers


def push(server: LiveServer, run_id: str, model: Path, version: int, *, seed: int, is_full: bool) -> None:
    if is_full:
        digest = publish_other_weights(server.sync_dir, run_id, version, seed=seed)
        route = "set_weights"
    else:
        digest = publish_random(server.sync_dir, run_id, version, model, seed=seed)
        route = "set_lora_adapter"
    body = {"run_id": run_id, "version": version, "manifest_sha256": digest}
    reply = httpx.post(f"{server.url}/{route}/", json=body, headers=server.headers, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["num_modules"] > 0
