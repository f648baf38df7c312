"""Streamed answers over ASGI by hand: what is sent when, and what a client that leaves does to its request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from axolotl.errors import ServerError
from axolotl.serving import streaming
from axolotl.serving.app import ServerState, build_app
from axolotl.serving.wire import (
    STREAM_LINE,
    ErrorBody,
    StreamEnd,
    StreamError,
    StreamGroup,
    StreamLine,
    StreamProgress,
    StreamStart,
)
from tests.fakes.engine import FakeEngine
from tests.support.claims import claim_of_this_process
from tests.support.protocol_suite import generate_request


class Call:
    """One request to the app. `await next_line()` takes what was sent; `leave()` closes the connection."""

    def __init__(self, app: Any, path: str, body: dict[str, object]) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self._lines: list[bytes] = []
        self.status = 0
        self.content_type = ""
        self.is_stalled = False
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"authorization", b"Bearer secret"),
                (b"content-type", b"application/json"),
            ],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.is_stalled:
            await asyncio.Event().wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.content_type = dict(message["headers"]).get(b"content-type", b"").decode()
        await self.messages.put(message)

    def leave(self) -> None:
        self._gone.set()

    async def next_line(self) -> StreamLine:
        while not self._lines:
            message = await self.messages.get()
            self._lines = message.get("body", b"").splitlines()
        return STREAM_LINE.validate_json(self._lines.pop(0))

    async def rest(self) -> bytes:
        await self.task
        parts = []
        while not self.messages.empty():
            parts.append(self.messages.get_nowait().get("body", b""))
        return b"".join(parts)


Body = Callable[[Any, FakeEngine, ServerState], Awaitable[None]]


def scenario(tmp_path: Path, body: Body) -> None:
    async def run() -> None:
        state = ServerState(instance_id="i-1", token="secret", sync_dir=tmp_path, max_held=3)
        engine = FakeEngine()
        state.ready(engine)
        await asyncio.wait_for(body(build_app(state), engine, state), 20)
        assert engine.num_open == 0
        assert state.serving is not None and state.serving.versions.num_in_flight == 0

    asyncio.run(run())


def streamed(**options: object) -> dict[str, object]:
    return {**generate_request().model_dump(), "stream": True, **options}


def plain(**options: object) -> dict[str, object]:
    return {**generate_request().model_dump(), **options}


def test_each_group_is_sent_when_it_is_finished(tmp_path: Path) -> None:
    async def body(app: Any, engine: FakeEngine, state: ServerState) -> None:
        engine.between_groups.clear()
        request = streamed()
        call = Call(app, "/generate/", request)
        start = await call.next_line()
        assert start == StreamStart(request_id=request["request_id"], instance_id="i-1", adapter_version=0)
        assert (call.status, call.content_type) == (200, "application/x-ndjson")
        first = await call.next_line()
        assert isinstance(first, StreamGroup) and first.group.index == 0 and not call.task.done()
        engine.between_groups.set()
        indexes = []
        while isinstance(line := await call.next_line(), StreamGroup):
            indexes.append(line.group.index)
        assert (indexes, line) == ([1, 2], StreamEnd())
        assert await call.rest() == b""

    scenario(tmp_path, body)


def test_progress_is_told_while_nothing_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axolotl.serving.app.STREAM_INTERVAL_S", 0.01)

    async def body(app: Any, engine: FakeEngine, state: ServerState) -> None:
        engine.gate.clear()
        call = Call(app, "/generate/", streamed())
        assert isinstance(await call.next_line(), StreamStart)
        for work in (3, 5):
            engine.work = work
            while (line := await call.next_line()) != StreamProgress(work=work):
                assert isinstance(line, StreamProgress) and line.work < work
        engine.gate.set()
        while not isinstance(await call.next_line(), StreamEnd):
            pass
        await call.task

    scenario(tmp_path, body)


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"adapter_version": 9}, 409, "E-SRV-13"),
        ({"run_id": "nobody"}, 409, "E-SRV-06"),
        ({"prompts": [[5], []], "seeds": None}, 422, "E-SRV-16"),
        ({"sampling": {"n": 2, "max_tokens": 1, "extra": {"no_such_option": 1}}}, 422, "E-SRV-16"),
    ],
)
def test_what_cannot_be_served_has_an_http_status(
    tmp_path: Path, changes: dict[str, object], status: int, code: str
) -> None:
    async def body(app: Any, engine: FakeEngine, state: ServerState) -> None:
        call = Call(app, "/generate/", streamed(**changes))
        assert ErrorBody.model_validate_json(await call.rest()).code == code
        assert call.status == status

    scenario(tmp_path, body)


@pytest.mark.parametrize(
    ("fault", "code"), [(ServerError("the engine died", code="E-SRV-20"), "E-SRV-20"), (OSError("/path"), "E-INT-01")]
)
def test_a_failure_in_the_middle_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, code: str
) -> None:
    monkeypatch.setattr("axolotl.serving.app.STREAM_INTERVAL_S", 0.01)

    async def body(app: Any, engine: FakeEngine, state: ServerState) -> None:
        engine.gate.clear()
        engine.fault = fault
        call = Call(app, "/generate/", streamed())
        assert isinstance(await call.next_line(), StreamStart)
        engine.gate.set()
        while isinstance(line := await call.next_line(), StreamProgress):
            pass
        assert isinstance(line, StreamError) and (line.status, line.error.code) == (500, code)
        assert "/path" not in line.model_dump_json() and await call.rest() == b""

    scenario(tmp_path, body)


def test_a_run_that_loses_the_server_gets_no_further_group(tmp_path: Path) -> None:
    async def body(app: Any, engine: FakeEngine, state: ServerState) -> None:
        claim = claim_of_this_process("first")
        await Call(app, "/session/", claim).task
        engine.between_groups.clear()
        call = Call(app, "/generate/", streamed(run_id="first"))
        assert isinstance(await call.next_line(), StreamStart)
        assert isinstance(await call.next_line(), StreamGroup)
        await Call(app, "/session/", {**claim, "run_id": "second"}).task
        engine.between_groups.set()
        line = await call.next_line()
        assert isinstance(line, StreamError) and (line.status, line.error.code) == (409, "E-SRV-06")
        await call.task

    scenario(tmp_path, body)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_ends_its_request(tmp_path: Path, is_streamed: bool) -> None:
    async def body(app: Any, engine: FakeEngine, state: ServerState) -> None:
        engine.between_groups.clear()
        call = Call(app, "/generate/", streamed() if is_streamed else plain())
        if is_streamed:
            assert isinstance(await call.next_line(), StreamStart)
            assert isinstance(await call.next_line(), StreamGroup)
        await engine.started.wait()
        assert engine.num_open == 1
        call.leave()
        await call.task
        assert engine.num_open == 0

    scenario(tmp_path, body)


def test_a_client_that_does_not_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SEND_TIMEOUT_S", 0.01)

    async def body(app: Any, engine: FakeEngine, state: ServerState) -> None:
        call = Call(app, "/generate/", streamed())
        call.is_stalled = True
        await call.task

    scenario(tmp_path, body)
