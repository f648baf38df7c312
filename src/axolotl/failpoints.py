"""Named places where a test can make the program die, fail or stand still.

    AXOLOTL_FAILPOINTS="ckpt.before_rename=kill@3;sync.after_files=raise:ENOSPC;rwd.sent=hang:5"

Each entry is `point=action`, or `point=action@n` for the n-th time only that the point is passed.

    kill        SIGKILL to this process
    exit        `SystemExit(1)`: a process leaves through its clean-ups, a thread other than the main one ends silently
    raise:NAME  an `OSError` with that errno (`ENOSPC`), or a `RuntimeError`
    delay:S     the calling thread waits S seconds, the others go on
    hang:S      the whole process stands still for S seconds: no thread runs and no signal but SIGKILL gets through

Off unless the variable is set: then a point is one look at an empty dict.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from axolotl.errors import EnvironmentFault

VARIABLE = "AXOLOTL_FAILPOINTS"

POINTS = frozenset(
    {
        "cfg.loaded",
        "srv.handshake",
        "srv.canary",
        "sync.before_save",
        "sync.after_files",
        "sync.before_manifest",
        "sync.before_rename",
        "sync.after_rename",
        "sync.after_post",
        "sync.after_ack",
        "gen.sent",
        "gen.partial",
        "gen.received",
        "rwd.sent",
        "rwd.received",
        "step.before_opt",
        "step.after_opt",
        "step.after_journal",
        "ckpt.start",
        "ckpt.after_model",
        "ckpt.after_optim",
        "ckpt.before_manifest",
        "ckpt.before_rename",
        "ckpt.after_rename",
        "ckpt.before_prune",
        "ckpt.after_prune",
        "end",
    }
)


@dataclass(frozen=True)
class Rule:
    """What happens at a point. nth: at which passing, counted from 1; 0 at every one."""

    act: Callable[[], None]
    nth: int = 0


# `arm` fills it before any thread is started; the counts are what threads share.
_armed: dict[str, list[Rule]] = {}
_passed: dict[str, int] = {}
_counting = threading.Lock()


def point(name: str) -> None:
    """Marks a place. Does nothing unless `arm` found a rule for it."""
    if _armed:
        _pass(name)


def arm(environment: Mapping[str, str]) -> None:
    """Read the variable, once, at the start of a command; earlier rules and counts are forgotten.

    Raises:
        EnvironmentFault: `E-ENV-13` an entry that names no point or no action.
    """
    rules = parse(environment.get(VARIABLE, ""))
    _armed.clear()
    _passed.clear()
    _armed.update(rules)


def parse(text: str) -> dict[str, list[Rule]]:
    """The rules of each point, in the order written. Errors as `arm`."""
    rules: dict[str, list[Rule]] = {}
    for entry in (part.strip() for part in text.split(";")):
        if not entry:
            continue
        name, _, action = entry.partition("=")
        if name not in POINTS:
            raise _refused(entry, f"there is no point {name!r}", f"points: {', '.join(sorted(POINTS))}")
        rules.setdefault(name, []).append(_rule(entry, action))
    return rules


def _pass(name: str) -> None:
    assert name in POINTS, name
    with _counting:
        count = _passed[name] = _passed.get(name, 0) + 1
    for rule in _armed.get(name, ()):
        if rule.nth in (0, count):
            rule.act()


def _rule(entry: str, text: str) -> Rule:
    action, _, nth = text.partition("@")
    verb, _, argument = action.partition(":")
    if nth and not (nth.isdecimal() and int(nth) > 0):
        raise _refused(entry, f"@{nth} is no count", "write @1 for the first time")
    make = _ACTIONS.get(verb)
    act = None if make is None else make(argument)
    if act is None or text.endswith("@"):
        raise _refused(entry, f"{text!r} is no action", "actions: kill, exit, raise:ERRNO, delay:SECONDS, hang:SECONDS")
    return Rule(act, int(nth or 0))


def _refused(entry: str, why: str, do: str) -> EnvironmentFault:
    return EnvironmentFault(f"{VARIABLE}: {entry} cannot be used", code="E-ENV-13", why=why, do=do)


# -- actions: each takes the text after the colon and returns what to do, or None where the text does not fit ----------


def _kill(argument: str) -> Callable[[], None] | None:
    return None if argument else lambda: os.kill(os.getpid(), signal.SIGKILL)


def _exit(argument: str) -> Callable[[], None] | None:
    def act() -> None:
        raise SystemExit(1)

    return None if argument else act


def _raise(argument: str) -> Callable[[], None] | None:
    number = getattr(errno, argument, None) if argument.startswith("E") else None

    def act() -> None:
        if number is None:
            raise RuntimeError(f"raised by {VARIABLE}")
        raise OSError(number, os.strerror(number))

    return act if isinstance(number, int) or argument == "RuntimeError" else None


def _delay(argument: str) -> Callable[[], None] | None:
    seconds = _seconds(argument)
    return None if seconds is None else lambda: time.sleep(seconds)


def _hang(argument: str) -> Callable[[], None] | None:
    seconds = _seconds(argument)
    return None if seconds is None else lambda: _freeze(seconds)


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= 86_400.0 else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _freeze(seconds: float) -> None:
    """Sleep with the interpreter lock held, which a call through `PyDLL` keeps; signals would end the sleep early."""
    whole = int(seconds)
    span = _Timespec(whole, int((seconds - whole) * 1e9))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        ctypes.PyDLL(None).nanosleep(ctypes.byref(span), None)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_ACTIONS: dict[str, Callable[[str], Callable[[], None] | None]] = {
    "kill": _kill,
    "exit": _exit,
    "raise": _raise,
    "delay": _delay,
    "hang": _hang,
}
