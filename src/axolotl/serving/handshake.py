"""Whether a server can be used: it answers, is one of ours, speaks this protocol and is done loading."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import httpx
from pydantic import ValidationError

from axolotl.errors import ServerError
from axolotl.serving.transport import CONNECT_TIMEOUT_S, Lost, Transport, is_loopback
from axolotl.serving.wire import INSTANCE_HEADER, PROTOCOL_VERSION, Health, ServerInfo

INFO_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 2.0
FIRST_POLL_INTERVAL_S = 0.1
REPORT_INTERVAL_S = 30.0
LOADING_S = 3600.0
"""How long a server may say that it loads in the same words, unless the timeout is longer. Large models from slow disks
take that long, and whoever waits is told; a server that hangs while it loads has to end the wait all the same."""
MIN_POLL_TIMEOUT_S = 0.2
START_HINT = "start it: axolotl vllm-serve config.yaml"

Say = Callable[[str], None]


def silent(line: str) -> None:
    """A `Say` for whoever does not want to know."""


@dataclass(frozen=True)
class Unready:
    """Why a server cannot be used yet.

    state: nobody answers; something else answers; it loads; it failed to. why: one line. instance_id: of the process
    that answered, as far as it says so.
    """

    state: Literal["absent", "stranger", "loading", "failed"]
    why: str
    instance_id: str | None = None


@dataclass(frozen=True)
class Ticker:
    """Time, for tests to replace."""

    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def poll(transport: Transport, timeout_s: float = CONNECT_TIMEOUT_S) -> Unready | None:
    """Ask once. None when the server can generate."""
    try:
        reply = transport.get("/health/", max(MIN_POLL_TIMEOUT_S, min(CONNECT_TIMEOUT_S, timeout_s)))
    except Lost as lost:
        return Unready("absent", lost.reason)
    try:
        health = Health.model_validate_json(reply.content)
    except ValidationError:
        server = reply.headers.get("server", "unknown")
        return Unready("stranger", f"HTTP {reply.status_code} to /health/ (Server: {server})")
    if health.status == "ok":
        return None
    state: Literal["failed", "loading"] = "failed" if health.status == "failed" else "loading"
    return Unready(state, health.phase, reply.headers.get(INSTANCE_HEADER))


def wait_ready(transport: Transport, timeout_s: float, ticker: Ticker, say: Say, check: Callable[[], None]) -> None:
    """Return once the server can generate. Arguments and errors as `ServerClient.wait_ready`.

    timeout_s: counts from the last time that a server of ours said that it loads. How long that takes is a matter of
    model, disk and network, and whoever waits is told what it does; but see `LOADING_S`.
    """
    if not is_loopback(transport.url) and transport.url.startswith("http:"):
        say(f"warning: the token travels unencrypted to {transport.url}; an SSH tunnel would hide it")
    next_report = started = heard_at = said_at = ticker.clock()
    said = ""
    interval = FIRST_POLL_INTERVAL_S
    while (problem := poll(transport)) is not None:
        check()
        if problem.state == "failed":
            raise ServerError(
                f"the server at {transport.url} failed to start",
                code="E-SRV-18",
                why=problem.why,
                do="see its own output",
            )
        now = ticker.clock()
        is_loading = problem.state == "loading"
        heard_at = now if is_loading else heard_at
        if problem.why != said:
            said, said_at = problem.why, now
        if is_loading and now - said_at >= loading_limit(timeout_s):
            raise _loads_for_ever(transport.url, problem, now - said_at)
        left = heard_at + timeout_s - now
        if left <= 0:
            raise _not_ready(transport.url, problem, timeout_s)
        if now >= next_report:
            time_left = f"for {now - started:.0f} s so far" if is_loading else f"{left:.0f} s left"
            say(f"waiting for the server at {transport.url} ({_readable(problem)}), {time_left}")
            next_report = now + REPORT_INTERVAL_S
        ticker.sleep(min(interval, left))
        interval = min(POLL_INTERVAL_S, 2 * interval)


def loading_limit(timeout_s: float) -> float:
    """Seconds that a server may say in the same words that it loads."""
    return max(timeout_s, LOADING_S)


def ask_info(transport: Transport, timeout_s: float = INFO_TIMEOUT_S) -> ServerInfo:
    """Who it is.

    Raises:
        Lost: it is gone again.
        ServerError: `E-SRV-02` another protocol, `E-SRV-03` it refuses the token, `E-SRV-09` no answer of ours.
    """
    reply = transport.get("/server_info/", timeout_s)
    if reply.status_code == 401:
        raise transport.token_refused()
    if reply.status_code == 503:
        raise Lost("is loading again")
    protocol = _protocol_of(reply)
    if reply.status_code != 200 or protocol != PROTOCOL_VERSION:
        raise ServerError(
            f"{transport.url} does not speak this protocol",
            code="E-SRV-02",
            why=f"protocol {protocol}, this program speaks {PROTOCOL_VERSION} (HTTP {reply.status_code})",
            do="run the same version of axolotl on both sides",
        )
    return transport.parse(reply, ServerInfo)


def _readable(problem: Unready) -> str:
    texts = {
        "refuses connections": "connection refused",
        "does not answer": "it accepts no connection or never answers",
    }
    return f"still loading: {problem.why}" if problem.state == "loading" else texts.get(problem.why, problem.why)


def _not_ready(url: str, problem: Unready, timeout_s: float) -> ServerError:
    if problem.state == "stranger":
        return ServerError(
            f"{url} is not an axolotl server",
            code="E-SRV-02",
            why=problem.why,
            do="is another service on this port? set vllm.port",
        )
    return ServerError(
        f"no server at {url} after {timeout_s:.0f} s ({_readable(problem)})",
        code="E-SRV-01",
        why="trl.vllm_server_timeout is over",
        do=START_HINT,
    )


def _loads_for_ever(url: str, problem: Unready, seconds: float) -> ServerError:
    return ServerError(
        f"the server at {url} is still loading ({problem.why})",
        code="E-SRV-01",
        why=f"it has said the same for {seconds:.0f} s",
        do="see its own output; where it does need longer, raise trl.vllm_server_timeout above that",
    )


def _protocol_of(reply: httpx.Response) -> object:
    try:
        body = reply.json()
    except ValueError:
        return None
    return body.get("protocol") if isinstance(body, dict) else None
