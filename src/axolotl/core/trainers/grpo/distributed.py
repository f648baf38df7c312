"""Every collective of ours. All ranks call these, in the same order, from the main thread.

    together(action)   ─► each rank acts ─► they agree ─► all go on, or all raise the same coded error
    a rank that ends otherwise ─► leaves a note in the store, closes its connections ─► the others' collectives fail
                              ─► they read the note and raise what it says

So nobody waits for a process that is gone: a killed one closes its connections too, and leaves no note.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from axolotl.errors import AxolotlError, InternalError, Interrupted, PeerError

T = TypeVar("T")

_NOTE = "axolotl/failure"

# How long a rank that failed waits for the others, which may be waiting for a server, to hear of it in order.
_GRACE_S = 20.0


class World:
    """The processes of a run; alone unless `open_world` made it.

    rank, size: of this process, and how many there are. agreed: the error that all of them raised together.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.rank = rank
        self.size = size
        self.agreed: Exception | None = None
        self.grace_s = _GRACE_S
        self._store = store

    @property
    def is_main(self) -> bool:
        """Whether this process does what is done once a run: the lock, the server, the files that all share."""
        return self.rank == 0

    def total(self, value: float) -> float:
        """The sum of one number a rank, on every rank."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.MAX)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in their order, on every rank. Small ones: they are pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._collective(lambda: dist.all_gather_object(found, value))
        return cast(list[T], found)

    def together(self, action: Callable[[], T]) -> T:
        """Run `action`, which contains no collective, here and on the others, and fail where any of them did.

        A rank that failed does not wait long: it leaves, and the others find its note.

        Raises:
            PeerError: another rank failed and this one did not; with that one's code.
        """
        if self.size == 1:
            return action()
        result: T | None = None
        problem: Exception | None = None
        try:
            result = action()
        except Exception as error:
            problem = error
        is_fault = problem is not None and not isinstance(problem, Interrupted)
        waits_s = self.grace_s if is_fault else None
        try:
            num_failed = self._reduced(float(problem is not None), dist.ReduceOp.SUM, waits_s)
        except PeerError:
            # A launcher ends those that are left with a signal: that is not what went wrong.
            if problem is None or not is_fault:
                raise
            raise problem from None
        if num_failed:
            self.agreed = self._agree(problem)
            raise self.agreed
        return cast(T, result)

    def alone(self, action: Callable[[], Any]) -> None:
        """The same for what only the main process does."""
        self.together(action if self.is_main else _nothing)

    def first(self, action: Callable[[], T]) -> T:
        """`action` of the main process, its result on every rank."""
        found = self.together(action if self.is_main else _nothing)
        return cast(T, self.gather(found)[0])

    def may_save(self, error: Exception) -> bool:
        """Whether all ranks stand at the same place with this error, so that collectives may follow."""
        return self.size == 1 or self.agreed is error

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around all that the ranks do with each other: an error that was not agreed on is told before it goes on."""
        if self.size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            _end_in_peace()
            if isinstance(error, RuntimeError) and _is_lost(error):
                raise self._lost(error) from error
            if self.agreed is not error and not isinstance(error, PeerError):
                self._tell(error)
            raise

    def _agree(self, problem: Exception | None) -> Exception:
        """What this rank raises, after all know what the others have."""
        reports = self.gather(None if problem is None else _report(self.rank, problem))
        _end_in_peace()
        told = [_told(report) for report in reports if report is not None]
        grave = next((error for error in told if not isinstance(error, Interrupted)), None)
        if problem is not None and not (isinstance(problem, Interrupted) and grave is not None):
            return problem
        return grave or told[0]

    def _reduced(self, value: float, operation: Any, timeout_s: float | None = None) -> float:
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        waiting = () if timeout_s is None else (timedelta(seconds=timeout_s),)
        self._collective(lambda: dist.all_reduce(tensor, op=operation, async_op=True).wait(*waiting))
        return float(tensor)

    def _collective(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _tell(self, error: Exception) -> None:
        with suppress(RuntimeError):
            cast(Store, self._store).set(_NOTE, json.dumps(_report(self.rank, error)))

    def _lost(self, error: RuntimeError) -> AxolotlError:
        _end_in_peace()
        with suppress(RuntimeError):
            store = cast(Store, self._store)
            if store.check([_NOTE]):
                return _told(json.loads(store.get(_NOTE)))
        said = str(error).splitlines()[0][:200]
        if "timed out" in said.lower():
            return PeerError(
                "another process of the run does not answer",
                code="E-PEER-02",
                why=f"it stands still, or works longer than ddp_timeout allows ({said})",
                do="look for what it waits for, or raise ddp_timeout, then rerun with --resume",
            )
        return PeerError(
            "another process of the run is gone",
            why=f"it left no report: it was killed, or its machine was lost ({said})",
            do="look for what ended it (out of memory?), then rerun with --resume",
        )


@contextmanager
def open_world(timeout_s: float = 1800.0) -> Iterator[World]:
    """The processes that a launcher started together, by its environment variables; one without.

    Args:
        timeout_s: the longest time that one rank waits for another.
    """
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if size == 1:
        yield World()
        return
    world = _meet(timedelta(seconds=timeout_s))
    try:
        yield world
    finally:
        dist.destroy_process_group()


def _meet(timeout: timedelta) -> World:
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        _end_in_peace()
        raise PeerError(
            "the processes of the run did not find each other",
            why=str(error).splitlines()[0][:200],
            do="look for one that ended before the others came, or for another program at MASTER_PORT",
        ) from error
    return World(rank, size, store)


def _nothing() -> None:
    return None


def _report(rank: int, error: Exception) -> dict[str, Any]:
    if not isinstance(error, AxolotlError):
        error = InternalError(f"{type(error).__name__}: {error}".splitlines()[0], do="please report")
    return {"rank": rank, "code": error.code, "what": error.what, "why": error.why, "do": error.do} | {
        "exit_code": error.exit_code,
        "is_signal": isinstance(error, Interrupted),
    }


def _told(report: dict[str, Any]) -> AxolotlError:
    if report["is_signal"]:
        return Interrupted(report["what"], signal_number=report["exit_code"] - 128)
    return PeerError(
        f"process {report['rank']}: {report['what']}",
        code=report["code"],
        why=report["why"],
        do=report["do"],
        exit_code_there=report["exit_code"],
    )


def _is_lost(error: RuntimeError) -> bool:
    """Whether a library's collective failed because another process is not there."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _end_in_peace() -> None:
    """A launcher sends SIGTERM to those that are left: they are ending, and with a report that says why."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
