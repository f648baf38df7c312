"""One live run an output directory: a lock that the system lets go of however the run ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from axolotl.errors import ConfigError, EnvironmentFault

LOCK = Path(".axolotl") / "lock"

# Processes forked from the run (reward workers) must not hold its lock when it is gone.
_held: set[int] = set()


@contextmanager
def run_lock(output_dir: Path) -> Iterator[None]:
    """Hold `output_dir` while the block runs; the directory is made where there is none.

    Raises:
        ConfigError: `E-CFG-31` another live run holds it.
        EnvironmentFault: it cannot be made or written to.
    """
    path = output_dir / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path, output_dir)
    except OSError as error:
        raise EnvironmentFault(
            f"output_dir {output_dir} cannot be used", code="E-ENV-08", why=error.strerror or str(error)
        ) from error
    _held.add(descriptor)
    try:
        yield
    finally:
        _held.discard(descriptor)
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()
        os.close(descriptor)


def _acquire(path: Path, output_dir: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _in_use(output_dir, holder) from None
            raise OSError(error.errno, f"its file system has no locks ({error.strerror})") from error
        if _is_still(descriptor, path):
            break
        # Its holder ended and removed the file between our opening and locking it.
        os.close(descriptor)
    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(note).encode(), 0)
    return descriptor


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _in_use(output_dir: Path, holder: bytes) -> ConfigError:
    try:
        note = json.loads(holder)
        who = f"pid {note['pid']} on {note['host']}, since {note['since']}"
    except (ValueError, KeyError, TypeError):
        who = "a process that has just started"
    return ConfigError(
        f"output_dir {output_dir} is in use by another run ({who})",
        code="E-CFG-31",
        why="two runs would write over each other's checkpoints",
        do="wait for it or stop it, or set output_dir",
    )


def _leave_to_parent() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
