"""The thread that alone touches the model: a queue of calls, how one is given up, and how all of them end.

event loop: run / cancellable ─► queue ─► thread `engine`: one call at a time
                └─ result, or the fault that ended the engine ◄┘
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from axolotl.errors import ServerError
from axolotl.serving.engines.inference import DecodingCancelled

T = TypeVar("T")


class Worker:
    """Methods are called on the event loop, but for `ends_on_failure`, which is for the calls in the thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._calls: set[threading.Event] = set()
        self._is_closing = False
        self._fault: ServerError | None = None
        self._died = asyncio.Event()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work`. Raises `ServerError` (there, or as the result) when nothing can be served any more."""
        if self._is_closing:
            raise ServerError("the engine gave up a request", code="E-SRV-21", why="the server is stopping")
        loop = asyncio.get_running_loop()

        def call() -> T:
            if self._fault is not None:
                raise self._fault
            try:
                return work()
            except torch.AcceleratorError as error:
                # The device's context is lost; every later call in this process fails as well.
                raise self._end(loop, "E-SRV-20", f"the device failed ({_first_line(error)})") from error
            except torch.OutOfMemoryError as error:
                raise ServerError(
                    "the engine failed on a request",
                    code="E-SRV-21",
                    why=f"out of memory on the device ({_first_line(error)})",
                    do="lower trl.max_completion_length, or leave the server a larger part of the device",
                ) from error

        return loop.run_in_executor(self._thread, call)

    @contextmanager
    def cancellable(self, work: Callable[[Callable[[], bool]], T]) -> Iterator[asyncio.Future[T]]:
        """Queue `work(is_cancelled)`; leaving the block gives it up before its next step.

        `DecodingCancelled`, where it is not the block's own doing, comes out as a `ServerError`.
        """
        cancelled = threading.Event()
        running = self.run(lambda: work(cancelled.is_set))
        running.add_done_callback(_retrieve)
        self._calls.add(cancelled)
        try:
            yield running
        except DecodingCancelled as error:
            raise ServerError(
                "the engine gave up a request",
                code="E-SRV-21",
                why="the server was claimed again or stopped while it ran",
            ) from error
        finally:
            self._calls.discard(cancelled)
            cancelled.set()
            running.cancel()

    def give_up_calls(self) -> None:
        """Every cancellable call, running or queued, ends before its next step."""
        for cancelled in self._calls:
            cancelled.set()

    @contextmanager
    def ends_on_failure(self, loop: asyncio.AbstractEventLoop, when: str) -> Iterator[None]:
        """In the thread: a failure within leaves weights that are neither old nor new, so nothing is served again."""
        try:
            yield
        except Exception as error:
            raise self._end(loop, "E-SRV-23", f"it failed while {when} ({type(error).__name__})") from error

    def _end(self, loop: asyncio.AbstractEventLoop, code: str, why: str) -> ServerError:
        """In the thread. Returns what this call and every later one is told."""
        self._fault = ServerError(
            "the transformers engine cannot serve any more", code=code, why=why, do="restart the server"
        )
        loop.call_soon_threadsafe(self._died.set)
        return self._fault

    async def died(self) -> str:
        """Returns, with the reason, once nothing is served any more."""
        await self._died.wait()
        assert self._fault is not None
        return self._fault.why

    async def close(self) -> None:
        """Give up every call and join the thread."""
        self._is_closing = True
        self.give_up_calls()
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)


def _retrieve(running: asyncio.Future[T]) -> None:
    """A failure of a call that nobody waits for any more is nobody's."""
    if not running.cancelled():
        running.exception()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
