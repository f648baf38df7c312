"""`python -m axolotl.serving.launcher PARENT_PID COMMAND...`: run COMMAND in this group, tied to the parent's life.

    parent's thread ends ─SIGTERM─► this process ─SIGTERM─► COMMAND ... 5 s ... ─SIGKILL─► everything in the group
    this process ends ────────────────────────────SIGKILL─► COMMAND

The first signal comes from the kernel when the *thread* of the parent that started this process ends, however it ends.
A process stays in between because COMMAND may be stopped, deaf, or loading with children that know nothing of us yet:
none of them may be left behind. Elsewhere than on Linux there is no such signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

PR_SET_PDEATHSIG = 1
GRACE_S = 5


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    _end_with(parent, signal.SIGTERM)
    own = os.getpid()
    if os.getpgrp() != own:
        os.setpgrp()
    child = os.fork()
    if child == 0:
        _end_with(own, signal.SIGKILL)
        _become(command)

    def stop(number: int, frame: FrameType | None) -> None:
        # It may have ended a moment ago, with the group's signal.
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        if os.getppid() != parent:
            signal.alarm(GRACE_S)

    signal.signal(signal.SIGALRM, lambda number, frame: _kill_group())
    signal.signal(signal.SIGTERM, stop)
    # The keyboard's interrupt is the parent's to judge; a session of its own keeps it away in any case.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getppid() != parent:
        _kill_group()
    _end_as(status)


def _end_with(parent: int, number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_as(status: int) -> None:
    """End as the command has ended, so that the parent sees its exit code or its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
