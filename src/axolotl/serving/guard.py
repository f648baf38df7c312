"""What stands around every route: who is let in, how much at once, and one spelling of the path.

address and Host ─ Origin ─ token ─ form and size of what is coming ─ room ─► the app
"""

from __future__ import annotations

import hmac
import ipaddress
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from axolotl.serving.refusals import Refusal
from axolotl.serving.wire import INSTANCE_HEADER
from axolotl.utils.schemas.hosts import ANY_ADDRESS

MAX_BODY_BYTES = 32 << 20
MAX_HEADER_BYTES = 16_384
MAX_REQUESTS = 64
MAX_GENERATE = 16
"""Requests to `/generate/` at once: eight that run and eight that wait."""
OPEN_PATHS = frozenset({"/health/"})
ALWAYS_ANSWERED = frozenset({"/health/", "/progress/", "/metrics/"})
_GENERATE = "/generate/"
_TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES} bytes"


class Guard:
    """ASGI middleware. Refuses before the body is read, puts one spelling of the path into the scope, and names the
    server process in every answer, errors included."""

    def __init__(self, app: ASGIApp, token: str, instance_id: str) -> None:
        self._app = app
        self._instance_id = instance_id
        self._expected = f"Bearer {token}".encode()
        self._own_names = frozenset({"localhost", socket.gethostname().lower()})
        self._answering = 0
        self._generating = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/") + "/"
        headers = Headers(scope=scope)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[INSTANCE_HEADER] = self._instance_id
            await send(message)

        try:
            self._check_origin(scope, headers)
            self._check_token(path, headers)
            _check_form(scope["method"], headers)
            self._enter(path)
        except Refusal as refusal:
            await error_response(refusal)(scope, receive, send_named)
            return
        try:
            await self._app({**scope, "path": path, "raw_path": path.encode()}, _Limited(receive), send_named)
        finally:
            self._leave(path)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """A web page can make a browser connect to loopback under the page's own name (DNS rebinding): that name is in
        Host. From other machines any name may lead here."""
        address = (scope.get("server") or ("",))[0]
        if _is_loopback(address) and not self._is_own_name(headers.get("host", "")):
            raise Refusal(
                403,
                "E-SRV-11",
                "the Host header is not a name of this machine's loopback address",
                do="use http://127.0.0.1 or http://localhost",
            )
        if "origin" in headers:
            raise Refusal(403, "E-SRV-11", "requests from web pages are refused")

    def _is_own_name(self, host: str) -> bool:
        name = _without_port(host).lower()
        return name in self._own_names or name in ANY_ADDRESS or _is_loopback(name)

    def _check_token(self, path: str, headers: Headers) -> None:
        if path not in OPEN_PATHS and not hmac.compare_digest(
            headers.get("authorization", "").encode(), self._expected
        ):
            raise Refusal(
                401,
                "E-SRV-10",
                "the token is missing or wrong",
                do="use the token in vllm.sync_dir/server.json, or set AXOLOTL_SERVER_TOKEN on both sides",
            )

    def _enter(self, path: str) -> None:
        """Take a place; raises a 429 `Refusal` when there is none. Health and progress need none."""
        if path in ALWAYS_ANSWERED:
            return
        if path == _GENERATE and self._generating >= MAX_GENERATE:
            raise _busy(f"{MAX_GENERATE} requests to {_GENERATE} at once")
        if self._answering >= MAX_REQUESTS:
            raise _busy(f"{MAX_REQUESTS} requests at once")
        self._answering += 1
        self._generating += path == _GENERATE

    def _leave(self, path: str) -> None:
        if path not in ALWAYS_ANSWERED:
            self._answering -= 1
            self._generating -= path == _GENERATE


def _busy(limit: str) -> Refusal:
    return Refusal(
        429, "E-SRV-30", f"the server is busy: {limit} is the limit", do="send it again when another was answered"
    )


def _check_form(method: str, headers: Headers) -> None:
    size = sum(len(name) + len(value) + 4 for name, value in headers.raw)
    if size > MAX_HEADER_BYTES:
        raise Refusal(431, "E-SRV-14", f"the headers have {size} bytes, at most {MAX_HEADER_BYTES}")
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refusal(415, "E-SRV-15", "bodies must be application/json")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refusal(415, "E-SRV-15", "content-encoding: bodies must not be compressed")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or len(length) > 15 or int(length) > MAX_BODY_BYTES:
        raise Refusal(413, "E-SRV-14", _TOO_LARGE)


def _without_port(host: str) -> str:
    """`127.0.0.1:8000` -> `127.0.0.1`, `[::1]:8000` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class _Limited:
    """A receive channel that raises once the body passes the limit, whatever its header said."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._size = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._size += len(message.get("body", b""))
        if self._size > MAX_BODY_BYTES:
            raise HTTPException(413, _TOO_LARGE)
        return message


def error_response(refusal: Refusal) -> Response:
    return Response(refusal.body.model_dump_json(), refusal.status, media_type="application/json")
