"""uvicorn with limits: how many connections, how large the headers, how long a request may take to arrive.

A request that has not arrived completely, headers and body, `ARRIVAL_S` seconds after the connection was opened or its
first byte came is answered 408 and the connection is closed. uvicorn itself waits for ever, so that a few slow clients
could hold every connection.
"""

from __future__ import annotations

import asyncio
import socket

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from axolotl.serving.refusals import Refusal

ARRIVAL_S = 30.0
KEEP_ALIVE_S = 75
MAX_SOCKETS = 256
"""Connections, idle ones included. `Guard` lets 64 of them be busy; the rest keeps `/health/` within reach."""
MAX_HEADER_BYTES = 32_768
"""What is parsed at all. `Guard` has the limit that is announced, with an answer that says so."""


def http_server(app: ASGIApp, *, graceful_shutdown_s: int | None = None) -> uvicorn.Server:
    """A server for `app`, to be run on a listening socket."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            access_log=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            http=TimedProtocol,
            lifespan="off",
            limit_concurrency=MAX_SOCKETS,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=graceful_shutdown_s,
            timeout_keep_alive=KEEP_ALIVE_S,
            ws="none",
        )
    )


class TimedProtocol(H11Protocol):
    """One connection. The timer runs while a request is on its way, and never while one is being answered."""

    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # An answer goes out in pieces, each of which would wait for the receipt of the one before: 40 ms. asyncio sees
        # to it only for sockets that were made with the number of TCP.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or self.transport.is_closing():
            self._stop_watching()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL_S, self._expire)

    def _stop_watching(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _expire(self) -> None:
        if self.transport.is_closing():
            return
        is_answered = self.cycle is not None and self.conn.their_state is h11.SEND_BODY and self.cycle.response_started
        if not is_answered:
            self.transport.write(_too_slow())
        self.transport.close()


def _too_slow() -> bytes:
    body = Refusal(408, "E-SRV-31", f"the request did not arrive within {ARRIVAL_S:.0f} s").body.model_dump_json()
    return (
        "HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()
