"""One exchange with the server, with a deadline: the only module of the trainer that knows URLs, headers and the token.

    Lost       ask again: nobody answered, the answer broke off, another process answers, the server is loading or busy
    AxolotlError   do not ask again: the server refused, or what answers is no server of ours

Nothing is repeated here; `recovery.py` does that. Redirects are not followed, and a proxy never stands before loopback.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from axolotl.errors import AxolotlError, NumericError, ServerError, SyncError
from axolotl.serving.server_file import SERVER_FILE, TOKEN_VARIABLE, read_server_file, read_token
from axolotl.serving.wire import INSTANCE_HEADER, ErrorBody

CONNECT_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 120.0
MAX_LINE_BYTES = 512 << 20
BUSY = frozenset({408, 429})

Answer = TypeVar("Answer", bound=BaseModel)


class Lost(Exception):
    """The server could not do what was asked, and asking again may help.

    reason: completes "the server ...". is_silent: it took the request and has not answered yet. is_hung: it is there,
    but its engine does nothing. is_busy: it is well, and has too much to do. refusal: what it said itself, if it spoke.
    """

    def __init__(
        self,
        reason: str,
        *,
        is_silent: bool = False,
        is_hung: bool = False,
        is_busy: bool = False,
        refusal: AxolotlError | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_silent = is_silent
        self.is_hung = is_hung
        self.is_busy = is_busy
        self.refusal = refusal


Waiting = Callable[[], AbstractContextManager[None]]


class Transport:
    """Used from any thread. waiting: entered while nothing happens but waiting for the server, so that whoever has
    something more urgent may raise from it. transport: for tests."""

    def __init__(
        self,
        url: str,
        sync_dir: Path,
        transport: httpx.BaseTransport | None = None,
        waiting: Waiting = nullcontext,
    ) -> None:
        self.url = url.rstrip("/")
        self._sync_dir = sync_dir
        self._transport = transport
        self._waiting = waiting
        is_local = is_loopback(url)
        self._http = httpx.Client(
            base_url=self.url,
            trust_env=not is_local,
            # Plain HTTP on loopback reads no certificates, which takes a while.
            verify=not is_local,
            follow_redirects=False,
            transport=transport,
        )

    def another(self) -> Transport:
        """One with connections of its own."""
        return Transport(self.url, self._sync_dir, self._transport)

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, timeout_s: float) -> httpx.Response:
        """Whatever answers. Raises `Lost` when nobody does."""
        timeout = httpx.Timeout(min(CONNECT_TIMEOUT_S, timeout_s), read=timeout_s)
        try:
            with self._waiting():
                try:
                    return self._http.get(path, headers=self._headers(), timeout=timeout)
                except httpx.RemoteProtocolError:
                    # A kept connection that ends at the moment it is used again says nothing of the server.
                    return self._http.get(path, headers=self._headers(), timeout=timeout)
        except httpx.TransportError as error:
            raise Lost(reason_of(error)) from error

    def post(
        self,
        path: str,
        body: BaseModel | None,
        answer: type[Answer],
        read_s: float,
        instance_id: str | None,
        error: type[AxolotlError] = ServerError,
    ) -> Answer:
        """The answer of the process `instance_id` (None: of any).

        Raises:
            Lost: see the module.
            AxolotlError: the refusal, of the kind that its code names, else `error`; `E-SRV-09` no answer of ours.
        """
        content = body.model_dump_json() if body is not None else "{}"
        try:
            with self._waiting():
                reply = self._http.post(path, content=content, headers=self._headers(), timeout=_timeout(read_s))
        except httpx.TransportError as problem:
            raise Lost(reason_of(problem), is_silent=isinstance(problem, httpx.ReadTimeout)) from problem
        self._check(reply, instance_id, error)
        return self.parse(reply, answer)

    @contextmanager
    def lines(self, path: str, body: BaseModel, read_s: float, instance_id: str | None) -> Iterator[Iterator[bytes]]:
        """The lines of a streamed answer. An iterator that ends is an answer whose connection was closed.

        Args:
            read_s: longest time without a byte.

        Raises:
            Lost, AxolotlError: as `post`.
        """
        content = body.model_dump_json()
        try:
            with ExitStack() as stack:
                with self._waiting():
                    reply = stack.enter_context(
                        self._http.stream(
                            "POST", path, content=content, headers=self._headers(), timeout=_timeout(read_s)
                        )
                    )
                if reply.status_code != 200:
                    reply.read()
                self._check(reply, instance_id, ServerError)
                yield self._lines(reply)
        except httpx.TransportError as problem:
            raise Lost(reason_of(problem)) from problem

    def parse(self, reply: httpx.Response, answer: type[Answer]) -> Answer:
        """Raises `E-SRV-09` when it is none."""
        try:
            return answer.model_validate_json(reply.content)
        except ValidationError as problem:
            raise self.no_answer_of_ours(f"HTTP {reply.status_code}, {problem.error_count()} problems in it") from None

    def no_answer_of_ours(self, why: str) -> ServerError:
        return ServerError(
            f"{self.url} gave an answer that is not of this protocol",
            code="E-SRV-09",
            why=why,
            do="run the same version of axolotl on both sides",
        )

    def token_refused(self) -> ServerError:
        given = "AXOLOTL_SERVER_TOKEN" if os.environ.get(TOKEN_VARIABLE) else str(self._sync_dir / SERVER_FILE)
        return ServerError(
            f"the server at {self.url} refuses the token",
            code="E-SRV-03",
            why=f"the token was taken from {given}",
            do="give trainer and server the same vllm.sync_dir, or the same AXOLOTL_SERVER_TOKEN",
        )

    def published_instance(self) -> str | None:
        """The instance that `server.json` names now."""
        found = read_server_file(self._sync_dir)
        return found.instance_id if found else None

    def _check(self, reply: httpx.Response, instance_id: str | None, error: type[AxolotlError]) -> None:
        """Return when it is a 200 of that process."""
        instance = reply.headers.get(INSTANCE_HEADER)
        if instance_id is not None and instance is not None and instance != instance_id:
            raise Lost("was restarted")
        if reply.status_code == 200:
            return
        if reply.status_code == 401:
            raise self.token_refused()
        try:
            body = ErrorBody.model_validate_json(reply.content)
        except ValidationError:
            if reply.status_code == 503:
                raise Lost("answers HTTP 503") from None
            raise self.no_answer_of_ours(f"HTTP {reply.status_code}, and the body is no error of ours") from None
        raise refusal(reply.status_code, body, error)

    def _lines(self, reply: httpx.Response) -> Iterator[bytes]:
        """Complete lines only: what a cut connection leaves of one is nothing."""
        parts: list[bytes] = []
        size = 0
        chunks = reply.iter_bytes()
        while (chunk := self._next(chunks)) is not None:
            first, *others = chunk.split(b"\n")
            parts.append(first)
            size += len(first)
            if size > MAX_LINE_BYTES:
                raise self.no_answer_of_ours(f"a line of more than {MAX_LINE_BYTES} bytes")
            if others:
                yield b"".join(parts)
                yield from others[:-1]
                parts, size = [others[-1]], len(others[-1])

    def _next(self, chunks: Iterator[bytes]) -> bytes | None:
        with self._waiting():
            return next(chunks, None)

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        token = read_token(self._sync_dir)
        return {**headers, "authorization": f"Bearer {token}"} if token else headers


def refusal(status: int, body: ErrorBody, error: type[AxolotlError] = ServerError) -> Exception:
    """What the server's own error means: `Lost` where asking again may help, else the error of its kind."""
    kinds: dict[str, type[AxolotlError]] = {"E-SRV": ServerError, "E-SYN": SyncError, "E-NUM": NumericError}
    kind = kinds.get(body.code[:5], error)
    said = kind(f"server: {body.what}", code=body.code, why=body.why, do=body.do)
    reason = body.what + (f" ({body.why})" if body.why else "")
    match body.code:
        case "E-SRV-17" | "E-SRV-20":
            return Lost(f"says: {reason}")
        case "E-SRV-05":
            return Lost(f"says: {reason}", is_hung=True, refusal=said)
        case "E-SRV-21" | "E-SRV-23":
            return Lost(f"says: {reason}", refusal=said)
    if status in BUSY or status == 503:
        return Lost(f"says: {reason}", is_busy=True, refusal=said)
    return said


def reason_of(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ConnectError):
        return "refuses connections"
    if isinstance(error, httpx.TimeoutException):
        return "does not answer"
    return f"broke off ({str(error) or type(error).__name__})"


def is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _timeout(read_s: float) -> httpx.Timeout:
    return httpx.Timeout(min(CONNECT_TIMEOUT_S, read_s), read=read_s, write=WRITE_TIMEOUT_S)
