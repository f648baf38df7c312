"""Clients that are slow or hold many connections, over real sockets and the fake engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from axolotl.serving import http_server
from axolotl.serving.wire import ErrorBody
from tests.fakes.engine import FakeEngine
from tests.support.live_server import LiveServer, live_server
from tests.support.protocol_suite import generate_request

DEADLINE_S = 20.0


@dataclass
class Served:
    """The engine behind the server and the loop it lives on."""

    engine: FakeEngine
    loop: asyncio.AbstractEventLoop


@pytest.fixture
def served() -> list[Served]:
    """One entry, once the server is up."""
    return []


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[Served]) -> Iterator[LiveServer]:
    async def create() -> FakeEngine:
        served.append(Served(FakeEngine(), asyncio.get_running_loop()))
        return served[0].engine

    monkeypatch.setattr(http_server, "ARRIVAL_S", 0.3)
    with live_server(tmp_path, create) as server:
        yield server


def connect(server: LiveServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), DEADLINE_S)


def head(server: LiveServer, length: int, token: str | None = None) -> bytes:
    return (
        f"POST /generate/ HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token or server.token}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def all_of(connection: socket.socket) -> bytes:
    """Until the server closes the connection."""
    received = b""
    while chunk := connection.recv(65_536):
        received += chunk
    return received


def test_no_piece_of_an_answer_waits_for_the_receipt_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nagle's algorithm and delayed receipts cost 40 ms a request, since answers have a head and many lines."""
    options: list[int] = []
    made = http_server.TimedProtocol.connection_made

    def noted(protocol: http_server.TimedProtocol, transport: asyncio.Transport) -> None:
        made(protocol, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def create() -> FakeEngine:
        return FakeEngine()

    monkeypatch.setattr(http_server.TimedProtocol, "connection_made", noted)
    with live_server(tmp_path, create) as server:
        httpx.get(f"{server.url}/health/")
    assert options == [1]


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health/ HTTP/1.1\r\nhost: localhost\r\n", "body"])
def test_a_request_that_does_not_arrive_is_408(server: LiveServer, sent: bytes | str) -> None:
    with connect(server) as connection:
        connection.sendall(head(server, 1_000) + b'{"request_id"' if sent == "body" else sent)
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    error = ErrorBody.model_validate_json(answer.partition(b"\r\n\r\n")[2])
    assert error.code == "E-SRV-31" and "did not arrive within" in error.what


def test_a_body_that_goes_on_after_its_refusal_does_not_hold_the_connection(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(head(server, 1_000, token="guess"))
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 401 ") and b"408" not in answer


def test_the_second_request_of_a_connection_is_timed_too(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health/ HTTP/1.1\r\nhost: localhost\r\n\r\n")
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        reply.read()
        assert reply.status == 200
        connection.sendall(b"GET /health/ HTTP/1.1\r\n")
        assert all_of(connection).startswith(b"HTTP/1.1 408 ")


def test_a_slow_answer_is_no_slow_request(server: LiveServer, served: list[Served]) -> None:
    """The request is held longer than one may take to arrive."""
    served[0].engine.gate.clear()
    body = generate_request().model_dump_json().encode()
    with connect(server) as connection, connect(server) as other:
        connection.sendall(head(server, len(body)) + body)
        all_of(other)  # opened later, and closed for being slow: the time of the first one is over as well
        served[0].loop.call_soon_threadsafe(served[0].engine.gate.set)
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 200 and json.loads(reply.read())["groups"]


def test_slow_clients_do_not_keep_health_from_answering(server: LiveServer) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(server)).sendall(head(server, 1_000))
        for _ in range(3):
            assert httpx.get(server.url + "/health/", timeout=DEADLINE_S).status_code == 200


def test_headers_that_are_too_large_are_4xx_or_cut_off(server: LiveServer) -> None:
    reply = httpx.get(server.url + "/health/", headers={"x-much": "x" * 20_000})
    assert reply.status_code == 431
    with connect(server) as connection:
        try:
            connection.sendall(b"GET /health/ HTTP/1.1\r\nhost: localhost\r\nx-much: " + b"x" * 200_000)
            answer = all_of(connection)
        except ConnectionError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert httpx.get(server.url + "/health/").status_code == 200


def test_the_server_says_nothing_of_its_software(server: LiveServer) -> None:
    assert "server" not in httpx.get(server.url + "/health/").headers
