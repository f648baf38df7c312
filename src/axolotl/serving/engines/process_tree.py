"""Child processes of this process, remembered by pid and start time, and ended by nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterable

import psutil

RESOURCE_TRACKER = "multiprocessing.resource_tracker"


def children() -> set[psutil.Process]:
    """All living descendants of this process. `psutil.Process` compares by pid and start time.

    Python's resource tracker is left out: it serves this whole process and ends with it.
    """
    return {process for process in psutil.Process().children(recursive=True) if not _is_resource_tracker(process)}


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any(RESOURCE_TRACKER in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def name(process: psutil.Process) -> str:
    """Its name as long as it lives."""
    try:
        return process.name()
    except psutil.Error:
        return "a process"


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs or is stopped; one that only waits to be reaped has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """What they have computed so far, as far as they still live; it grows in steps of 10 ms."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def first_exit(processes: Iterable[psutil.Process]) -> psutil.Process:
    """The first of `processes` to end; one that ended before counts. The kernel tells, nothing polls.

    Waits for ever where the kernel cannot tell (anything but Linux), and when `processes` is empty.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[psutil.Process] = loop.create_future()

    def end(process: psutil.Process) -> None:
        if not ended.done():
            ended.set_result(process)

    with contextlib.ExitStack() as watches:
        if sys.platform == "linux":
            for process in processes:
                try:
                    descriptor = os.pidfd_open(process.pid)
                except ProcessLookupError:
                    return process
                watches.callback(os.close, descriptor)
                loop.add_reader(descriptor, end, process)
                watches.callback(loop.remove_reader, descriptor)
                if not process.is_running():
                    # The pid is another process's by now: that one is being watched.
                    return process
        return await ended


def stop(processes: set[psutil.Process], *, grace_s: float = 5.0) -> None:
    """Wait `grace_s` for `processes` to end, then terminate those left, then kill."""
    alive = _wait(processes, grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    alive = _wait(alive, grace_s) if alive else set()
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if alive:
        _wait(alive, grace_s)


def _wait(processes: set[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    return {process for process in alive if process.status() != psutil.STATUS_ZOMBIE}
