"""Answers of one line a finished group (NDJSON), and what a client that leaves does to its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from axolotl.serving.faults import log_bug, refusal_of
from axolotl.serving.wire import (
    Group,
    StreamEnd,
    StreamError,
    StreamGroup,
    StreamLine,
    StreamProgress,
    StreamStart,
)

T = TypeVar("T")

#: Longest that a client may leave a line unread. It keeps a policy version in memory meanwhile.
SEND_TIMEOUT_S = 60.0


class ClientGone(Exception):
    """The connection was closed before the answer was there."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled when the client leaves. Raises `ClientGone` then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancel(working, leaving)


class StreamedAnswer(StreamingResponse):
    """Sends `StreamLine`s. Make one with `begin`. However it ends, `groups` is closed, which aborts its request."""

    def __init__(self, groups: _Groups, start: StreamStart, work: Callable[[], int]) -> None:
        super().__init__(_encoded(_lines(groups, start, work)), media_type="application/x-ndjson")
        self._groups = groups

    @classmethod
    async def begin(
        cls,
        groups: AsyncGenerator[Group, None],
        start: StreamStart,
        work: Callable[[], int],
        *,
        interval_s: float,
    ) -> StreamedAnswer:
        """Wait for the first group, for one interval at most.

        What `groups` raises until then is raised here, so that a request that cannot be served gets an HTTP status.

        Args:
            work: the number for the lines of progress, of which one comes for each interval without a group.
        """
        waiting = _Groups(groups, interval_s)
        try:
            await waiting.first()
        except BaseException:
            await waiting.close()
            raise
        return cls(waiting, start, work)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        sending = asyncio.ensure_future(self.stream_response(send_in_time))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with suppress(OSError):  # TimeoutError is one: it does not read, or it has left
                    sending.result()
        finally:
            await _cancel(sending, leaving)
            await self._groups.close()


class _Groups:
    """The groups of a request, one wait at a time: `next` returns None when an interval passes without one."""

    def __init__(self, groups: AsyncGenerator[Group, None], interval_s: float) -> None:
        self._groups = groups
        self._interval_s = interval_s
        self._pending: asyncio.Future[Group | StreamEnd] | None = None

    async def first(self) -> None:
        """Wait as `next`, but leave what comes for it. Raises what the request raises."""
        pending = self._pull()
        await asyncio.wait({pending}, timeout=self._interval_s)
        if pending.done():
            pending.result()

    async def next(self) -> Group | StreamEnd | None:
        pending = self._pull()
        done, _ = await asyncio.wait({pending}, timeout=self._interval_s)
        if not done:
            return None
        self._pending = None
        return pending.result()

    async def close(self) -> None:
        if self._pending is not None:
            await _cancel(self._pending)
        await self._groups.aclose()

    def _pull(self) -> asyncio.Future[Group | StreamEnd]:
        if self._pending is None:
            self._pending = asyncio.ensure_future(_or_end(anext(self._groups, StreamEnd())))
        return self._pending


async def _or_end(item: Awaitable[Group | StreamEnd]) -> Group | StreamEnd:
    """A task needs a coroutine; `anext` of a generator is only awaitable."""
    return await item


async def _lines(groups: _Groups, start: StreamStart, work: Callable[[], int]) -> AsyncIterator[StreamLine]:
    yield start
    try:
        while not isinstance(item := await groups.next(), StreamEnd):
            yield StreamProgress(work=work()) if item is None else StreamGroup(group=item)
    except Exception as error:
        log_bug(error)
        refusal = refusal_of(error)
        yield StreamError(status=refusal.status, error=refusal.body)
    else:
        yield item


async def _encoded(lines: AsyncIterator[StreamLine]) -> AsyncIterator[bytes]:
    async for line in lines:
        yield line.model_dump_json().encode() + b"\n"


async def _gone(receive: Receive) -> None:
    """Returns when the client has left. The body has been read: all that can still come is the end."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
