"""Child processes of this process, remembered by pid and start time, and ended by nothing else."""

from __future__ import annotations

import contextlib

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
