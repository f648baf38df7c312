"""The trainer's side of the HTTP protocol: the only module that knows URLs, retries and deadlines.

Every wait ends. Transport errors are retried until the deadline, since a request repeats without harm (its seeds
decide its tokens); 4xx answers never are.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from axolotl.errors import AxolotlError, NumericError, ServerError, SyncError
from axolotl.serving.server_file import SERVER_FILE, TOKEN_VARIABLE, read_token
from axolotl.serving.wire import (
    INSTANCE_HEADER,
    PROTOCOL_VERSION,
    AdapterResponse,
    ErrorBody,
    Fingerprint,
    GenerateRequest,
    GenerateResponse,
    Health,
    Sampling,
    ServerInfo,
    SessionRequest,
    SessionResponse,
    SetAdapterRequest,
)

CONNECT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 120.0
RELEASE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 2.0
FIRST_POLL_INTERVAL_S = 0.1
REPORT_INTERVAL_S = 30.0
START_HINT = "start it: axolotl vllm-serve config.yaml"

Answer = TypeVar("Answer", bound=BaseModel)


class ServerClient:
    """Synchronous, used from one thread at a time.

    Args:
        url: `http://host:port`.
        sync_dir: where the server left its token, unless `AXOLOTL_SERVER_TOKEN` gives it.
        timeout_s: the longest time without an answer; also the deadline of `wait_ready`.
        transport, sleep, clock: for tests.
    """

    def __init__(
        self,
        url: str,
        sync_dir: Path,
        timeout_s: float,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/")
        self._sync_dir = sync_dir
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._clock = clock
        self._claim: SessionRequest | None = None
        self._info: ServerInfo | None = None
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=timeout_s, write=timeout_s),
            trust_env=not is_loopback(url),
            transport=transport,
        )

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def info(self) -> ServerInfo:
        """What `wait_ready` was told."""
        assert self._info is not None, "call wait_ready first"
        return self._info

    def close(self) -> None:
        self._http.close()

    def wait_ready(
        self, on_wait: Callable[[str], None] | None = None, *, check: Callable[[], None] = lambda: None
    ) -> ServerInfo:
        """Return once the server can generate.

        Args:
            on_wait: called with one line when waiting begins and every 30 s.
            check: called after every unsuccessful poll; what it raises ends the wait.

        Raises:
            ServerError: `E-SRV-01` nobody answers, or the server is still loading at the deadline; `E-SRV-02`
                something answers that is no server of ours or speaks another protocol; `E-SRV-03` it refuses the
                token; `E-SRV-18` it failed to load, at once.
        """
        started = self._clock()
        deadline = started + self._timeout_s
        next_report = started
        interval = FIRST_POLL_INTERVAL_S
        while (problem := self._poll()) is not None:
            check()
            now = self._clock()
            if now >= deadline:
                raise self._not_ready(problem)
            if on_wait is not None and now >= next_report:
                on_wait(f"waiting for the server at {self.url} ({problem.why}), {deadline - now:.0f} s left")
                next_report = now + REPORT_INTERVAL_S
            self._sleep(min(interval, deadline - now))
            interval = min(POLL_INTERVAL_S, 2 * interval)
        self._info = self._handshake()
        return self._info

    def claim(self, run_id: str, fingerprint: Fingerprint) -> SessionResponse:
        """Make the server work for this run: adapters and caches of earlier runs are dropped.

        Raises:
            ServerError: `E-SRV-06` another live run holds it, `E-SRV-07` its model is not the one being trained.
        """
        request = SessionRequest(run_id=run_id, host=socket.gethostname(), pid=os.getpid(), fingerprint=fingerprint)
        response = self._post("/session/", request, SessionResponse, CONTROL_TIMEOUT_S)
        self._claim = request
        return response

    def release(self) -> None:
        """Give the server back. Does nothing without a claim; a server that is gone is released already."""
        if self._claim is None:
            return
        body = self._claim.model_copy(update={"action": "release"}).model_dump()
        self._claim = None
        with suppress(httpx.TransportError):
            self._http.post("/session/", json=body, headers=self._headers(), timeout=RELEASE_TIMEOUT_S)

    def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Completions of `request`, checked against it; asked for by the run of the claim, if there is one.

        Raises:
            ServerError: `E-SRV-04` no answer within the timeout, or the server was restarted; `E-SRV-09` an answer
                that does not fit the request; `E-SRV-06` another run has taken the server; the server's own code for
                a request it refuses.
        """
        if self._claim is not None:
            request = request.model_copy(update={"run_id": self._claim.run_id})
        response = self._post("/generate/", request, GenerateResponse, self._timeout_s)
        check_reply(request, response, self.info)
        return response

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        temperature: float,
        adapter_version: int,
    ) -> list[list[float]]:
        """Log-probs of `tokens[i]` after `prompts[i]` under `adapter_version`; NaN where not finite."""
        request = GenerateRequest(
            request_id=f"score-{uuid.uuid4().hex}",
            adapter_version=adapter_version,
            prompts=[list(prompt) for prompt in prompts],
            sampling=Sampling(max_tokens=1, temperature=temperature),
            score_ids=[list(ids) for ids in tokens],
        )
        response = self.generate(request)
        return [
            [math.nan if value is None else value for value in group.completions[0].logprobs]
            for group in response.groups
        ]

    def set_adapter(self, version: int, manifest_sha256: str) -> AdapterResponse:
        """Have the server load and serve a published version of this run's adapter.

        Raises:
            SyncError: the server refused it, or confirms something else.
        """
        assert self._claim is not None, "claim the server first"
        body = SetAdapterRequest(run_id=self._claim.run_id, version=version, manifest_sha256=manifest_sha256)
        response = self._post("/set_lora_adapter/", body, AdapterResponse, CONTROL_TIMEOUT_S, SyncError)
        if (response.adapter_version, response.manifest_sha256) != (version, manifest_sha256):
            raise SyncError(
                f"the server confirms adapter version {response.adapter_version}, pushed was {version}",
                code="E-SYN-01",
            )
        return response

    def clear_adapter(self) -> AdapterResponse:
        """Have the server go back to the base model."""
        return self._post("/clear_lora_adapter/", None, AdapterResponse, CONTROL_TIMEOUT_S, SyncError)

    def _poll(self) -> ServerError | None:
        """Why the server cannot be used yet, None when it can. Raises at once when it never will."""
        try:
            reply = self._http.get("/health/", timeout=CONNECT_TIMEOUT_S)
        except httpx.TimeoutException:
            return _absent("accepts no connection or never answers")
        except httpx.TransportError as error:
            return _absent("connection refused" if isinstance(error, httpx.ConnectError) else _reason(error))
        try:
            health = Health.model_validate_json(reply.content)
        except ValidationError:
            server = reply.headers.get("server", "unknown")
            return ServerError(
                f"{self.url} is not an axolotl server",
                code="E-SRV-02",
                why=f"HTTP {reply.status_code} to /health/ (Server: {server})",
                do="is another service on this port? set vllm.port",
            )
        if health.status == "failed":
            raise ServerError(
                f"the server at {self.url} failed to start", code="E-SRV-18", why=health.phase, do="see its own output"
            )
        return None if health.status == "ok" else _absent(f"still loading: {health.phase}")

    def _not_ready(self, problem: ServerError) -> ServerError:
        if problem.code == "E-SRV-02":
            return problem
        return ServerError(
            f"no server at {self.url} after {self._timeout_s:.0f} s ({problem.why})",
            code="E-SRV-01",
            why="trl.vllm_server_timeout is over",
            do=START_HINT,
        )

    def _handshake(self) -> ServerInfo:
        try:
            reply = self._http.get("/server_info/", headers=self._headers(), timeout=CONTROL_TIMEOUT_S)
        except httpx.TransportError as error:
            raise ServerError(
                f"the server at {self.url} was there and is gone", code="E-SRV-01", why=_reason(error), do=START_HINT
            ) from error
        if reply.status_code == 401:
            raise self._token_refused()
        protocol = _protocol_of(reply)
        if reply.status_code != 200 or protocol != PROTOCOL_VERSION:
            raise ServerError(
                f"{self.url} does not speak this protocol",
                code="E-SRV-02",
                why=f"protocol {protocol}, this program speaks {PROTOCOL_VERSION} (HTTP {reply.status_code})",
                do="run the same version of axolotl on both sides",
            )
        try:
            return ServerInfo.model_validate_json(reply.content)
        except ValidationError as problem:
            raise self._no_answer_of_ours(reply, problem) from problem

    def _post(
        self,
        path: str,
        body: BaseModel | None,
        answer: type[Answer],
        timeout_s: float,
        error: type[AxolotlError] = ServerError,
    ) -> Answer:
        """One exchange, repeated on transport errors and 503 until `timeout_s` have passed without an answer."""
        content = body.model_dump_json() if body is not None else "{}"
        deadline = self._clock() + timeout_s
        interval = FIRST_POLL_INTERVAL_S
        while True:
            is_slow = False
            try:
                reply = self._http.post(
                    path,
                    content=content,
                    headers={**self._headers(), "content-type": "application/json"},
                    timeout=httpx.Timeout(
                        CONNECT_TIMEOUT_S, read=max(0.1, deadline - self._clock()), write=CONTROL_TIMEOUT_S
                    ),
                )
                reason = f"HTTP {reply.status_code}"
            except httpx.TransportError as transport_error:
                reply = None
                reason = _reason(transport_error)
                is_slow = isinstance(transport_error, httpx.ReadTimeout)
            if reply is not None:
                self._check_instance(reply)
                if reply.status_code != 503:
                    return self._answer(reply, answer, error)
            if self._clock() + interval >= deadline:
                raise self._lost(path, reason, timeout_s, is_slow=is_slow)
            self._sleep(interval)
            interval = min(POLL_INTERVAL_S, 2 * interval)

    def _lost(self, path: str, reason: str, timeout_s: float, *, is_slow: bool) -> ServerError:
        """is_slow: it took the request and gave no answer, so that it may still be at work."""
        if path == "/generate/" and is_slow:
            return ServerError(
                f"the server at {self.url} did not finish one request within trl.vllm_server_timeout",
                code="E-SRV-04",
                why=f"no answer for {timeout_s:.0f} s, which is the limit of each request",
                do="raise trl.vllm_server_timeout, then rerun train with --resume",
            )
        return ServerError(
            f"the server at {self.url} is lost ({path.strip('/')})",
            code="E-SRV-04",
            why=f"{reason}; no answer for {timeout_s:.0f} s",
            do=START_HINT + ", then rerun train with --resume",
        )

    def _answer(self, reply: httpx.Response, answer: type[Answer], error: type[AxolotlError]) -> Answer:
        if reply.status_code == 401:
            raise self._token_refused()
        try:
            if reply.status_code == 200:
                return answer.model_validate_json(reply.content)
            body = ErrorBody.model_validate_json(reply.content)
        except ValidationError as problem:
            raise self._no_answer_of_ours(reply, problem) from problem
        if body.code.startswith("E-NUM"):
            error = NumericError
        raise error(f"server: {body.what}", code=body.code, why=body.why, do=body.do)

    def _no_answer_of_ours(self, reply: httpx.Response, problem: ValidationError) -> ServerError:
        return ServerError(
            f"{self.url} gave an answer that is not of this protocol",
            code="E-SRV-09",
            why=f"HTTP {reply.status_code}, {problem.error_count()} problems in the body",
            do="run the same version of axolotl on both sides",
        )

    def _check_instance(self, reply: httpx.Response) -> None:
        instance = reply.headers.get(INSTANCE_HEADER)
        if self._info is not None and instance is not None and instance != self._info.instance_id:
            raise ServerError(
                f"the server at {self.url} was restarted during the run",
                code="E-SRV-04",
                why=f"instance {self._info.instance_id} is gone, {instance} answers and has no adapter",
                do="rerun train with --resume",
            )

    def _headers(self) -> dict[str, str]:
        token = read_token(self._sync_dir)
        return {"authorization": f"Bearer {token}"} if token else {}

    def _token_refused(self) -> ServerError:
        given = "AXOLOTL_SERVER_TOKEN" if os.environ.get(TOKEN_VARIABLE) else str(self._sync_dir / SERVER_FILE)
        return ServerError(
            f"the server at {self.url} refuses the token",
            code="E-SRV-03",
            why=f"the token was taken from {given}",
            do="give trainer and server the same vllm.sync_dir, or the same AXOLOTL_SERVER_TOKEN",
        )


def is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_reply(request: GenerateRequest, response: GenerateResponse, info: ServerInfo) -> None:
    """Raise `E-SRV-09` unless the answer is one to this request: ids, counts, order, lengths, version, instance."""
    expected = {
        "request_id": (response.request_id, request.request_id),
        "instance_id": (response.instance_id, info.instance_id),
        "adapter_version": (response.adapter_version, request.adapter_version),
        "groups": ([group.index for group in response.groups], list(range(len(request.prompts)))),
    }
    for name, (got, wanted) in expected.items():
        if got != wanted:
            raise _bad_reply(f"{name} is {got!r}, asked was {wanted!r}")
    vocab_size = info.fingerprint.summary.get("vocab_size")
    num_completions = 1 if request.score_ids is not None else request.sampling.n
    for group in response.groups:
        if len(group.completions) != num_completions:
            raise _bad_reply(f"group {group.index} has {len(group.completions)} completions, not {num_completions}")
        for position, completion in enumerate(group.completions):
            name = f"completion {position} of group {group.index}"
            ids = completion.ids
            if len(ids) != len(completion.logprobs):
                raise _bad_reply(f"{name} has {len(ids)} tokens and {len(completion.logprobs)} log-probs")
            if request.score_ids is not None and ids != request.score_ids[group.index]:
                raise _bad_reply(f"{name} scores other tokens than asked")
            if request.score_ids is None and not 1 <= len(ids) <= request.sampling.max_tokens:
                raise _bad_reply(f"{name} has {len(ids)} tokens, max_tokens is {request.sampling.max_tokens}")
            if vocab_size is not None and not all(0 <= token < vocab_size for token in ids):
                raise _bad_reply(f"{name} has a token outside the vocabulary of {vocab_size}")


def _bad_reply(why: str) -> ServerError:
    return ServerError("the server's answer does not fit the request", code="E-SRV-09", why=why, do="please report")


def _absent(why: str) -> ServerError:
    return ServerError("no server", code="E-SRV-01", why=why)


def _reason(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ConnectError):
        return "connection refused"
    if isinstance(error, httpx.TimeoutException):
        return "no answer"
    return str(error) or type(error).__name__


def _protocol_of(reply: httpx.Response) -> object:
    try:
        body = reply.json()
    except ValueError:
        return None
    return body.get("protocol") if isinstance(body, dict) else None
