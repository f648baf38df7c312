"""Starting a server's process group, and ending a group or a tree of processes: those, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TERMINATE_S = 20.0
KILL_S = 10.0
_POLL_S = 0.02


def start_group(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    """Run `command` in a process group of its own that ends with the calling *thread*; its output goes to the log."""
    launcher = [sys.executable, "-m", "axolotl.serving.launcher", str(os.getpid()), *command]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            launcher,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def signal_group(group: int, number: signal.Signals) -> None:
    """Nothing happens when the group is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def end_group(group: int) -> None:
    """SIGKILL to all that is left of the group, and wait until nothing of it runs: memory and port are free then.

    Orphans that have ended stay in the process table until init looks at them, which may be never in a container.
    """
    deadline = time.monotonic() + KILL_S
    signal_group(group, signal.SIGKILL)
    while _runs(group) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        signal_group(group, signal.SIGKILL)


def _runs(group: int) -> bool:
    """Whether the group has a member that is no zombie."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return any(_is_alive(process) for process in psutil.process_iter() if group_of(process.pid) == group)


def group_of(pid: int) -> int | None:
    """None when there is no such process."""
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def ended_how(code: int) -> str:
    """`exit code 3` or `SIGKILL`, from a return code of `subprocess`."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


@dataclass(frozen=True)
class StoppedTree:
    """num_processes: that ended, the root included. num_killed: those of them that SIGTERM to the root did not end."""

    num_processes: int
    num_killed: int


def stop_tree(root: psutil.Process, *, terminate_s: float = TERMINATE_S) -> StoppedTree:
    """End `root` and its descendants: SIGTERM to the root, which closes the others; SIGKILL after `terminate_s`.

    The descendants are known by pid and start time, so a process that got a pid anew is never meant.
    """
    tree = {root, *_descendants(root)}
    with suppress(psutil.NoSuchProcess):
        root.terminate()
        # A stopped process takes no signal but this one and SIGKILL.
        root.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + terminate_s
    while _is_alive(root) and time.monotonic() < deadline:
        # Once the root is gone its children can no longer be found through it.
        tree |= _descendants(root)
        time.sleep(_POLL_S)
    left = {process for process in tree if _is_alive(process)}
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + KILL_S
    while any(map(_is_alive, left)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return StoppedTree(len(tree), len(left))


def _descendants(root: psutil.Process) -> set[psutil.Process]:
    try:
        return set(root.children(recursive=True))
    except psutil.Error:
        return set()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
