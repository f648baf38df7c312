"""What stands around every route: token, content type, size of the body, optional trailing slash, instance header."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from axolotl.serving.refusals import Refusal
from axolotl.serving.wire import INSTANCE_HEADER

MAX_BODY_BYTES = 32 << 20
OPEN_PATHS = frozenset({"/health/"})
_TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES} bytes"


class Guard:
    """ASGI middleware. Refuses before the body is read, puts one spelling of the path into the scope, and names the
    server process in every answer, errors included."""

    def __init__(self, app: ASGIApp, token: str, instance_id: str) -> None:
        self._app = app
        self._instance_id = instance_id
        self._expected = f"Bearer {token}".encode()

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
            self._check(path, scope["method"], headers)
        except Refusal as refusal:
            await error_response(refusal)(scope, receive, send_named)
            return
        await self._app({**scope, "path": path, "raw_path": path.encode()}, _Limited(receive), send_named)

    def _check(self, path: str, method: str, headers: Headers) -> None:
        if "origin" in headers:
            raise Refusal(403, "E-SRV-11", "requests from web pages are refused")
        if path not in OPEN_PATHS and not hmac.compare_digest(
            headers.get("authorization", "").encode(), self._expected
        ):
            raise Refusal(
                401,
                "E-SRV-10",
                "the token is missing or wrong",
                do="use the token in vllm.sync_dir/server.json, or set AXOLOTL_SERVER_TOKEN on both sides",
            )
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refusal(415, "E-SRV-15", "bodies must be application/json")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise Refusal(413, "E-SRV-14", _TOO_LARGE)


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
