"""A disk whose k-th operation does not happen: it fails, or the process ends there."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class _Writes:
    """A file whose writes are counted."""

    def __init__(self, file: Any, operation: Callable[[], None]) -> None:
        self._file, self._operation = file, operation

    def __enter__(self) -> _Writes:
        return self

    def __exit__(self, *problem: object) -> None:
        self._file.close()

    def write(self, content: Any) -> int:
        self._operation()
        return int(self._file.write(content))

    def fileno(self) -> int:
        return int(self._file.fileno())


class FailingDisk:
    """Counts writes, fsyncs, renames, new directories and `further` functions of os. num_operations: how many there
    were."""

    def __init__(self, fails_at: int, fail: Callable[[], None], further: tuple[str, ...] = ()) -> None:
        self._counted_names = ("fsync", "rename", "mkdir", *further)
        self.num_operations = 0
        self._fails_at, self._fail = fails_at, fail

    def operation(self) -> None:
        self.num_operations += 1
        if self.num_operations == self._fails_at:
            self._fail()

    @contextmanager
    def in_use(self) -> Iterator[FailingDisk]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self._counted_names:
                patch.setattr(os, name, self._counted(getattr(os, name)))
            really_open = io.open

            def counted_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
                opened = really_open(file, mode, *args, **kwargs)
                return _Writes(opened, self.operation) if set(mode) & set("wax+") else opened

            patch.setattr(io, "open", counted_open)
            yield self

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.operation()
            return function(*args, **kwargs)

        return counted


def is_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def is_killed() -> None:
    os._exit(9)
