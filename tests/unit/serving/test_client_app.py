"""The client and the real app over a fake engine: what a restart, a hung engine and a slow one look like to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from axolotl.errors import ServerError
from axolotl.serving.client import ServerClient
from axolotl.serving.engines.protocol import Engine, EngineProgress
from axolotl.serving.processes import ProcessTable
from axolotl.serving.session import LEASE_S
from tests.fakes.engine import FAKE_FINGERPRINT, FakeEngine
from tests.support.adapters import publish_fake
from tests.support.live_server import LiveServer, live_server
from tests.support.requests import request_for


class Address(httpx.BaseTransport):
    """One address behind which one server follows another."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.before_generate: Callable[[], None] | None = None
        self._sockets = httpx.HTTPTransport(verify=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        hook, is_generate = self.before_generate, request.url.path == "/generate/"
        if hook is not None and is_generate:
            self.before_generate = None
            hook()
        request.url = request.url.copy_with(port=httpx.URL(self.server.url).port)
        return self._sockets.handle_request(request)

    def close(self) -> None:
        self._sockets.close()


def serve(stack: ExitStack, directory: Path, engine: FakeEngine, instance_id: str) -> LiveServer:
    async def create() -> Engine:
        return engine

    return stack.enter_context(live_server(directory, create, instance_id=instance_id))


def test_a_restarted_server_gets_the_versions_from_their_files(tmp_path: Path) -> None:
    with ExitStack() as stack:
        old, new = FakeEngine(), FakeEngine()
        address = Address(serve(stack, tmp_path, old, "one"))
        client = stack.enter_context(ServerClient("http://127.0.0.1:1", tmp_path, 20, transport=address))
        client.wait_ready()
        client.claim("r", FAKE_FINGERPRINT)
        for version in (1, 2, 3):
            client.set_adapter(version, publish_fake(tmp_path, "r", version))
        request = request_for(version=3)
        before = client.generate(request)

        def restart() -> None:
            address.server = serve(stack, tmp_path, new, "two")

        address.before_generate = restart
        after = client.generate(request)
        assert (before.instance_id, after.instance_id) == ("one", "two")
        assert [group.completions for group in after.groups] == [group.completions for group in before.groups]
        assert {group.instance_id for group in after.groups} == {"two"}
        assert new.calls == ["reset", "load v2", "load v3", "generate v3"]


@pytest.mark.parametrize("scores", [False, True])
def test_an_engine_that_does_nothing_is_hung_though_the_server_speaks(scores: bool, tmp_path: Path) -> None:
    with ExitStack() as stack:
        engine = FakeEngine()
        engine.gate.clear()
        if scores:
            engine.score = lambda *_: hold(engine)  # type: ignore[method-assign,assignment]
        server = serve(stack, tmp_path, engine, "one")
        client = stack.enter_context(server.client(timeout_s=1.0))
        client.wait_ready()
        request = request_for(1).model_copy(update={"score_ids": [[2]] if scores else None})
        began = time.monotonic()
        with pytest.raises(ServerError, match="makes no progress") as problem:
            client.generate(request)
        assert problem.value.code == "E-SRV-05" and 0.8 < time.monotonic() - began < 8


def hold(engine: FakeEngine) -> Awaitable[list[list[float]]]:
    async def wait() -> list[list[float]]:
        await engine.gate.wait()
        return []

    return asyncio.ensure_future(wait())


class BusyEngine(FakeEngine):
    """Changes nothing before somebody has looked at its progress `LOOKS` times, and makes tokens meanwhile."""

    LOOKS = 8

    def __init__(self) -> None:
        super().__init__()
        self.load_gate.clear()

    def progress(self) -> EngineProgress:
        self.work += 1
        if self.work == self.LOOKS:
            self.load_gate.set()
        return super().progress()

    async def load_adapter(self, version: int, directory: Path) -> int:
        await self.load_gate.wait()
        return await super().load_adapter(version, directory)

    async def reset(self) -> None:
        await self.load_gate.wait()
        await super().reset()


@pytest.mark.parametrize("waits", ["claim", "push"])
def test_a_call_that_waits_behind_others_is_done_once_or_has_no_trace_of_its_repetitions(
    waits: str, tmp_path: Path
) -> None:
    timeout_s = 0.8
    with ExitStack() as stack:
        engine = BusyEngine()
        client = stack.enter_context(serve(stack, tmp_path, engine, "one").client(timeout_s))
        client.wait_ready()
        if waits == "push":
            engine.load_gate.set()
        client.claim("r", FAKE_FINGERPRINT)
        if waits == "push":
            engine.load_gate.clear()
        digest = publish_fake(tmp_path, "r", 1)
        began = time.monotonic()
        assert client.set_adapter(1, digest).loaded_versions == [1]
        assert waits == "claim" or time.monotonic() - began > timeout_s
        assert engine.work >= engine.LOOKS and engine.calls.count("load v1") == 1
        assert engine.calls[-1] == "load v1" and client.info.instance_id == "one"
        assert client.generate(request_for(version=1)).adapter_version == 1


def test_a_run_that_was_paused_comes_back_when_another_has_had_the_server(tmp_path: Path) -> None:
    """Both are in other containers, so that the server knows of their lives only what it hears."""
    runs = ("run-0123456789ab", "run-ba9876543210")
    with ExitStack() as stack:
        engine = FakeEngine()
        server = serve(stack, tmp_path, engine, "one")
        first, second = (stack.enter_context(server.client(timeout_s=20)) for _ in runs)
        assert server.state is not None and server.state.serving is not None
        session = server.state.serving.session
        now = time.monotonic()
        session._clock = lambda: now
        session._processes = ProcessTable("another container")
        for client in (first, second):
            client.wait_ready()
        first.claim(runs[0], FAKE_FINGERPRINT)
        for version in (1, 2):
            first.set_adapter(version, publish_fake(tmp_path, runs[0], version))
        before = first.generate(request_for(version=2))
        with pytest.raises(ServerError, match=f"in use by run {runs[0]}"):
            second.claim(runs[1], FAKE_FINGERPRINT)
        now += LEASE_S + 1
        second.claim(runs[1], FAKE_FINGERPRINT)
        with pytest.raises(ServerError, match=f"run {runs[0]} does not hold"):
            first.generate(request_for(version=2))
        second.set_adapter(1, publish_fake(tmp_path, runs[1], 1))
        second.release()
        assert first.generate(request_for(version=2)).groups == before.groups
        assert engine.calls[-4:] == ["reset", "load v1", "load v2", "generate v2"]
        assert not (tmp_path / "adapters" / runs[1]).exists(), "that one has given it back"


def test_only_the_run_that_holds_the_server_clears_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = serve(stack, tmp_path, FakeEngine(), "one")
        client = stack.enter_context(server.client())
        client.wait_ready()
        client.claim("first", FAKE_FINGERPRINT)
        client.set_adapter(1, publish_fake(tmp_path, "first", 1))
        url, headers = f"{server.url}/clear_lora_adapter/", server.headers
        for body, status in (({"run_id": "second"}, 409), ({}, 422)):
            assert httpx.post(url, json=body, headers=headers).status_code == status
        assert client.generate(request_for(version=1)).adapter_version == 1
        assert client.clear_adapter().loaded_versions == []
