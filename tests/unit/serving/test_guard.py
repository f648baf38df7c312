"""Who is let in, and how much at once: the guard alone, around an app that records what reached it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from axolotl.serving.guard import MAX_GENERATE, MAX_HEADER_BYTES, MAX_REQUESTS, Guard
from axolotl.serving.wire import ErrorBody

TOKEN = {"authorization": "Bearer secret"}


class Inner:
    """reached: paths, in order. gate: requests are answered when it is open."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope["path"])
        if scope["path"] not in ("/health/", "/progress/", "/metrics/"):
            await self.gate.wait()
        await PlainTextResponse("in")(scope, receive, send)


def as_seen_on(address: str, app: ASGIApp) -> ASGIApp:
    """The app as a connection to `address` of this machine sees it."""

    async def seen(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "server": (address, 8000)}, receive, send)

    return seen


def with_guard(body: Callable[[httpx.AsyncClient, Inner], Awaitable[None]], address: str = "127.0.0.1") -> None:
    async def run() -> None:
        inner = Inner()
        transport = httpx.ASGITransport(as_seen_on(address, Guard(inner, token="secret", instance_id="i-1")))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000", headers=TOKEN) as client:
            await asyncio.wait_for(body(client, inner), 20)

    asyncio.run(run())


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, ErrorBody.model_validate_json(reply.content).code


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "LOCALHOST:8000", "[::1]:8000", "127.1.2.3", "0.0.0.0:8000", socket.gethostname()],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_names_of_this_machine_are_taken_on_loopback(host: str, address: str) -> None:
    async def body(client: httpx.AsyncClient, inner: Inner) -> None:
        assert (await client.get("/health/", headers={"host": host})).status_code == 200

    with_guard(body, address)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[", "10.0.0.1"]
    + ["127.0.0.1@evil.example", "2130706433", "0x7f.1"],
)
@pytest.mark.parametrize("path", ["/health/", "/generate/"])
def test_another_name_on_loopback_is_a_web_page_in_disguise(host: str, path: str) -> None:
    async def body(client: httpx.AsyncClient, inner: Inner) -> None:
        reply = await client.post(path, json={}, headers={"host": host})
        assert code(reply) == (403, "E-SRV-11")
        assert inner.reached == []

    with_guard(body)


def test_from_other_machines_any_name_may_lead_here_with_the_token() -> None:
    async def body(client: httpx.AsyncClient, inner: Inner) -> None:
        headers = {"host": "gpu-7.cluster.example"}
        assert (await client.get("/server_info/", headers=headers)).status_code == 200
        reply = await client.get("/server_info/", headers={**headers, "authorization": "Bearer guess"})
        assert code(reply) == (401, "E-SRV-10")

    with_guard(body, "10.1.2.3")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip", "GZIP"])
def test_compressed_bodies_are_refused_unread(encoding: str) -> None:
    async def body(client: httpx.AsyncClient, inner: Inner) -> None:
        reply = await client.post("/generate/", json={}, headers={"content-encoding": encoding})
        assert code(reply) == (415, "E-SRV-15") and "content-encoding" in reply.text
        assert inner.reached == []

    with_guard(body)


@pytest.mark.parametrize("length", ["-1", "1e3", "\xb2", "9" * 5_000, str((32 << 20) + 1)])
def test_a_length_that_is_no_length_or_too_much(length: str) -> None:
    async def body(client: httpx.AsyncClient, inner: Inner) -> None:
        headers = {"content-length": length.encode("latin-1"), "content-type": b"application/json"}
        reply = await client.post("/generate/", content=b"{}", headers=headers)
        assert code(reply) == (413, "E-SRV-14") and str(32 << 20) in reply.text
        assert inner.reached == []

    with_guard(body)


def test_large_headers_are_refused_with_the_limit() -> None:
    async def body(client: httpx.AsyncClient, inner: Inner) -> None:
        reply = await client.get("/health/", headers={"x-much": "x" * MAX_HEADER_BYTES})
        assert code(reply) == (431, "E-SRV-14") and f"at most {MAX_HEADER_BYTES}" in reply.text
        assert (await client.get("/health/", headers={"x-some": "x" * (MAX_HEADER_BYTES - 500)})).status_code == 200

    with_guard(body)


@pytest.mark.parametrize(("path", "limit"), [("/generate/", MAX_GENERATE), ("/session/", MAX_REQUESTS)])
def test_one_request_too_many_is_429_until_another_was_answered(path: str, limit: int) -> None:
    async def body(client: httpx.AsyncClient, inner: Inner) -> None:
        inner.gate.clear()
        waiting = [asyncio.create_task(client.post(path, json={})) for _ in range(limit)]
        while len(inner.reached) < limit:
            await asyncio.sleep(0)
        reply = await client.post(path, json={})
        assert code(reply) == (429, "E-SRV-30") and str(limit) in reply.text
        for always in ("/health", "/progress", "/metrics"):
            assert (await client.get(always)).status_code == 200
        inner.gate.set()
        assert {(await each).status_code for each in waiting} == {200}
        assert (await client.post(path, json={})).status_code == 200

    with_guard(body)


def test_refused_requests_take_no_place() -> None:
    async def body(client: httpx.AsyncClient, inner: Inner) -> None:
        for _ in range(2 * MAX_REQUESTS):
            await client.post("/generate/", json={}, headers={"authorization": "Bearer guess"})
        assert (await client.post("/generate/", json={})).status_code == 200

    with_guard(body)


def test_a_request_that_fails_gives_its_place_back() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken")

    async def run() -> None:
        transport = httpx.ASGITransport(Guard(failing, token="secret", instance_id="i"), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=TOKEN) as client:
            statuses = {(await client.post("/generate/", json={})).status_code for _ in range(2 * MAX_GENERATE)}
        assert statuses == {500}

    asyncio.run(run())
