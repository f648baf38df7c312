"""Standard output and error that never end a command: what cannot be written is discarded."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

# Space may come back: later lines are tried again.
_MAY_PASS = frozenset({errno.ENOSPC, errno.EDQUOT})


class SteadyFile(io.FileIO):
    """A descriptor whose writes do not fail. It stays open when this is closed.

    A reader or terminal that is gone does not come back: the descriptor then leads to the null device, also for
    processes that inherit it. `problem` is the first write that failed.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.problem: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                rest = rest[self._write_some(rest) :]
        except OSError as problem:
            self.problem = self.problem or problem
            if problem.errno not in _MAY_PASS:
                lead_nowhere(self.fileno())
        return size

    def _write_some(self, data: memoryview) -> int:
        """At least one byte. Whoever shares the descriptor may have made it non-blocking."""
        while True:
            # typeshed leaves out the None of a descriptor that would block.
            written: int | None = super().write(data)
            if written:
                return written
            select.select([], [self], [])


@contextmanager
def steady_streams() -> Iterator[SteadyFile | None]:
    """`sys.stdout` and `sys.stderr` that discard what cannot be written, and escape what cannot be encoded.

    Yields the file below stdout, None where somebody else has replaced stdout; such a stream is left alone.
    """
    with ExitStack() as stack:
        stdout = stack.enter_context(_steady("stdout", 1))
        stack.enter_context(_steady("stderr", 2))
        yield stdout


@contextmanager
def _steady(name: str, descriptor: int) -> Iterator[SteadyFile | None]:
    former: TextIO | None = getattr(sys, name)
    if former is None and _is_open(descriptor):
        # Closed at the start, and another file's by now.
        descriptor = os.open(os.devnull, os.O_WRONLY)
    elif former is None:
        # Else the next file that is opened gets the descriptor, and what libraries print lands in it.
        lead_nowhere(descriptor)
    elif _descriptor_of(former) != descriptor:
        yield None
        return
    file = SteadyFile(descriptor)
    if former is not None:
        _flush(former)
    stream = text_over(file, former)
    setattr(sys, name, stream)
    try:
        yield file
    finally:
        stream.flush()
        setattr(sys, name, former)


def text_over(file: SteadyFile, former: TextIO | None) -> io.TextIOWrapper:
    """Text with the encoding and buffering of the stream that it replaces."""
    is_unbuffered = getattr(former, "write_through", False)
    return io.TextIOWrapper(
        file if is_unbuffered else io.BufferedWriter(file),
        encoding=former.encoding if former is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=getattr(former, "line_buffering", True),
        write_through=is_unbuffered,
    )


def lead_nowhere(descriptor: int) -> None:
    """Make the descriptor, open or not, one of the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(descriptor, True)
        return
    os.dup2(null, descriptor)
    os.close(null)


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError:
        return


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
