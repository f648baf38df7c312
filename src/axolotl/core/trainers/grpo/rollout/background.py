"""Groups made in the background: one thread that does HTTP and nothing else.

    main thread   place(order) ─► orders ─┐                       ┌─► groups(): one by one, or what went wrong
    the thread                            └─► make ─► results ────┘

Orders are made one after the other, as they were placed. Their number is bounded by `depth + 1`: the main thread places
one for each that it takes. The thread touches neither the model nor collectives.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from axolotl.core.trainers.grpo.types import CompletionGroup, Order
from axolotl.errors import AxolotlError, ServerError

POLL_S = 1.0
JOIN_S = 5.0

Finished = tuple[int, CompletionGroup]


@dataclass
class _Made:
    """What has become of an order. results: finished groups, then None, or the error that making them ended with.
    kept: the finished groups once more, for a checkpoint."""

    order: Order
    kept: list[Finished] = field(default_factory=list)
    results: queue.SimpleQueue[Finished | BaseException | None] = field(default_factory=queue.SimpleQueue)
    is_done: threading.Event = field(default_factory=threading.Event)


class BackgroundProducer:
    """A `DataProducer` with a thread of its own, which is started with the first order.

    Args:
        make: as `GroupMaker.make`; runs on the thread. Closing its iterator gives the rest up.
        depth: rollouts ahead; 0 hands out groups as they finish, and makes none in advance.
        waiting: entered on the main thread while it waits, so that a signal may end the wait.
        close_backend: called at the end, after the thread.
    """

    def __init__(
        self,
        make: Callable[[Order], Iterator[Finished]],
        *,
        depth: int,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        close_backend: Callable[[], None] = lambda: None,
    ) -> None:
        self._make = make
        self.depth = depth
        self._waiting = waiting
        self._close_backend = close_backend
        self._orders: queue.SimpleQueue[_Made | None] = queue.SimpleQueue()
        self._made: deque[_Made] = deque()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat = time.monotonic()
        self._failure: AxolotlError | None = None

    @property
    def placed(self) -> Sequence[Order]:
        return tuple(made.order for made in self._made)

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the thread last finished a group or took an order."""
        return time.monotonic() - self._beat

    @property
    def num_ready(self) -> int:
        """Orders that are made and wait."""
        return sum(made.is_done.is_set() for made in self._made)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Nothing when all is made in turn: then the thread is idle while training is not."""
        if not self.depth:
            return {}
        return {"producer/ready": float(self.num_ready), "producer/heartbeat_age_s": self.heartbeat_age}

    def place(self, order: Order) -> None:
        assert len(self._made) <= self.depth, "an order is taken before another one is placed"
        made = _Made(order)
        self._made.append(made)
        self._orders.put(made)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="axolotl-producer", daemon=True)
            self._thread.start()

    def adopt(self, order: Order, groups: Sequence[Finished]) -> None:
        made = _Made(order, list(groups))
        for finished in (*groups, None):
            made.results.put(finished)
        made.is_done.set()
        self._made.append(made)

    def finished(self) -> list[tuple[Order, list[Finished]]]:
        made = [made for made in self._made if made.is_done.is_set()]
        return [(item.order, list(item.kept)) for item in made if len(item.kept) == len(item.order.slots)]

    def groups(self) -> Iterator[Finished]:
        made = self._made[0]
        num_left = len(made.order.slots)
        while True:
            match self._next(made):
                case None:
                    return
                case BaseException() as error:
                    raise error
                case finished:
                    num_left -= 1
                    if not num_left:
                        # Not before: a checkpoint in the middle of the step has to know of it.
                        self._made.popleft()
                    yield finished

    def drain(self) -> None:
        for made in self._made:
            while not made.is_done.is_set():
                self._poll(lambda made=made: made.is_done.wait(POLL_S))  # type: ignore[misc]

    def close(self) -> None:
        self._stopped.set()
        self._orders.put(None)
        if self._thread is not None:
            # It looks at the flag after every group; one that waits for a server ends with the client's connections.
            self._thread.join(JOIN_S)
        self._close_backend()

    def _next(self, made: _Made) -> Finished | BaseException | None:
        while True:
            try:
                return cast(Finished | BaseException | None, self._poll(lambda: made.results.get(timeout=POLL_S)))
            except queue.Empty:
                continue

    def _poll(self, wait: Callable[[], Any]) -> Any:
        """One short wait; raises when nobody is left to wait for."""
        if self._thread is not None and not self._thread.is_alive():
            raise ServerError("the thread that fetches completions has ended", code="E-SRV-25", do="please report")
        with self._waiting():
            return wait()

    def _run(self) -> None:
        while (made := self._orders.get()) is not None and not self._stopped.is_set():
            self._beat = time.monotonic()
            try:
                if self._failure is not None:
                    raise self._failure
                self._fill(made)
            except AxolotlError as error:
                # Nobody asks a lost server again for what comes after: the run is about to end.
                self._failure = error
                made.results.put(error)
            except BaseException as error:  # it is raised again where the groups are taken
                made.results.put(error)
            else:
                made.results.put(None)
            made.is_done.set()

    def _fill(self, made: _Made) -> None:
        iterator = self._make(made.order)
        with closing(iterator):  # type: ignore[type-var]
            for finished in iterator:
                if self._stopped.is_set():
                    return
                made.kept.append(finished)
                made.results.put(finished)
                self._beat = time.monotonic()
