"""`python -m axolotl.serving.launcher PARENT_PID COMMAND...`: run COMMAND in this group, tied to the parent's life.

    parent's thread ends ─SIGCONT─► this process ─SIGTERM─► COMMAND ... 5 s ... ─SIGKILL─► everything in the group
    this process ends ────────────────────────────SIGKILL─► COMMAND
    the group is stopped meanwhile:  a process outside of it ... 5 s ... ─SIGKILL─► everything in the group

The first signal comes from the kernel when the *thread* of the parent that started this process ends, however it ends.
It is SIGCONT because that one reaches a stopped process too, which then goes on; a SIGTERM would wait for ever.
A process stays in between because COMMAND may be stopped, deaf, or loading with children that know nothing of us yet:
none of them may be left behind. Elsewhere than on Linux there is no such signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
GRACE_S = 5

# Blocked and waited for: a handler could be missed between its signal and the wait, and SIGCONT comes only once.
_AWAITED = (signal.SIGALRM, signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT)


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _end_with(parent, signal.SIGCONT)
    own = os.getpid()
    if os.getpgrp() != own:
        os.setpgrp()
    child = os.fork()
    if child == 0:
        _end_with(own, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        _become(command)
    # The keyboard's interrupt is the parent's to judge; a session of its own keeps it away in any case.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = _watch(child, parent)
    if os.getppid() != parent:
        _kill_group()
    _end_as(status)


def _watch(child: int, parent: int) -> int:
    """Pass on what ends the child until it has ended; its status."""
    is_ending = False
    while True:
        number, sender = _next_signal()
        if number == signal.SIGALRM:
            _kill_group()
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        is_orphan = os.getppid() != parent
        if is_orphan and not is_ending:
            _kill_group_from_outside()
        # A SIGCONT of anybody else only lets a stopped group go on; the kernel's has the parent as its sender.
        if number == signal.SIGTERM or (number == signal.SIGCONT and sender == parent) or (is_orphan and not is_ending):
            os.kill(child, signal.SIGTERM)
        if is_orphan and not is_ending:
            is_ending = True
            signal.alarm(GRACE_S)
            # Whoever is stopped may close as the others do.
            os.killpg(os.getpgrp(), signal.SIGCONT)


def _next_signal() -> tuple[int, int]:
    """Which one, and the pid of its sender, 0 where the system does not tell."""
    if sys.platform == "darwin":
        return signal.sigwait(_AWAITED), 0
    info = signal.sigwaitinfo(_AWAITED)
    return info.si_signo, info.si_pid


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


def _kill_group_from_outside() -> None:
    """Kill it after the grace period also when the group is stopped meanwhile, this process and its alarm with it.

    By a process in a group of its own, from its first moment on. It ends with this one, so that the group it kills is
    this one and none that has its number later.
    """
    group, own = os.getpgrp(), os.getpid()
    outside = os.fork()
    if outside != 0:
        os.setpgid(outside, outside)
        return
    os.setpgid(0, 0)
    _end_with(own, signal.SIGKILL)
    time.sleep(GRACE_S)
    if os.getppid() == own:
        os.killpg(group, signal.SIGKILL)
    os._exit(0)


def _end_as(status: int) -> None:
    """End as the command has ended, so that the parent sees its exit code or its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
