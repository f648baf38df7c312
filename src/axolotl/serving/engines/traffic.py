"""Requests on one side, the replacement of the weights on the other: never both at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Traffic:
    """Event loop only.

    await traffic.open()            waits while somebody has stopped the traffic
    check the version; no await     what is checked here holds for every task started below
    traffic.start(...)              counted until the task ends, also when it never got to run

    async with traffic.stopped():   new requests wait, those under way have ended
    """

    def __init__(self) -> None:
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()

    async def open(self) -> None:
        # Between the event and this task's turn somebody else may have stopped it again.
        while not self._open.is_set():
            await self._open.wait()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        assert self._open.is_set(), "traffic is stopped"
        task = asyncio.ensure_future(work)
        self._num_running += 1
        self._idle.clear()
        task.add_done_callback(self._ended)
        return task

    def _ended(self, _: asyncio.Task[Any]) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Waits for what is running. One caller at a time."""
        assert self._open.is_set(), "stopped twice"
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()
