"""What runs have published below `sync_dir`, and when it is deleted.

    <sync_dir>/adapters/<run_id>/v<N>/, weights/<run_id>/v<N>/    written by the trainer
    <sync_dir>/runs/<run_id>.json                                 by the server: which process the run is; its time of
                                                                  change is the run's last sign of life

A run that was paused (its process stopped, its machine asleep or out of the network) loses the server once its lease is
over and another run wants it. It may come back: it claims the server again and pushes again what it had published. So
the directories of a run are deleted only when nobody can ask for them any more:

- it gave the server back, or its own process has begun another run;
- its process is gone, which can be seen only from the same pid namespace;
- it cannot be seen, and has been silent for `KEEP_S` or for longer than `MAX_SILENT` others.

They go when the next run claims the server, and when the server is stopped. So besides those of the run in session and
of processes that can be seen to live, there are those of `MAX_SILENT` runs at most.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from axolotl.serving.manifest import Kind
from axolotl.serving.processes import ProcessTable, RunProcess

KEEP_S = 24 * 3600.0
MAX_SILENT = 4
DIRECTORIES: dict[Kind, str] = {"adapter": "adapters", "weights": "weights"}
_RECORDS = "runs"
_RUN = re.compile(r"run-[0-9a-f]{12}")
_VERSION = re.compile(r"(\.tmp-)?v[0-9]+")
_LOG = logging.getLogger(__name__)


class _Record(BaseModel):
    """is_over: nobody will ask for its versions again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: str
    pid: int
    started: int | None
    is_over: bool = False

    @property
    def process(self) -> RunProcess:
        return RunProcess(self.namespace, self.pid, self.started)


@dataclass(frozen=True)
class _Found:
    """A run that has left something. heard_at: its last sign of life, in seconds since the epoch."""

    run_id: str
    record: _Record | None
    heard_at: float


class RunDirectories:
    """Blocking calls, of one thread at a time. What cannot be written or deleted stays: no run fails for it.

    now: seconds since the epoch.
    """

    def __init__(
        self, sync_dir: Path, processes: ProcessTable | None = None, *, now: Callable[[], float] = time.time
    ) -> None:
        self._sync_dir = sync_dir
        self._records = sync_dir / _RECORDS
        self._processes = processes or ProcessTable()
        self._now = now

    def claimed(self, run_id: str, process: RunProcess) -> None:
        if _RUN.fullmatch(run_id):
            self._write(run_id, _Record(namespace=process.namespace, pid=process.pid, started=process.started))

    def heard(self, run_id: str) -> None:
        """A sign of life of a run that has claimed."""
        with suppress(OSError):
            os.utime(self._record_file(run_id), (self._now(), self._now()))

    def over(self, run_id: str) -> None:
        """The run has given the server back, or its process has begun another run."""
        record = self._read(run_id)
        if record is not None:
            self._write(run_id, record.model_copy(update={"is_over": True}))

    def clean(self, kept: str | None = None) -> None:
        """Delete what the rule above lets go, but nothing of the run `kept`."""
        silent = []
        for run in self._found():
            if run.run_id == kept:
                continue
            if self._is_over(run):
                self._remove(run.run_id)
            elif not self._is_alive(run):
                silent.append(run)
        silent.sort(key=lambda run: run.heard_at, reverse=True)
        for run in silent[MAX_SILENT:]:
            self._remove(run.run_id)
        for name in (_RECORDS, *DIRECTORIES.values()) if kept is None else ():
            with suppress(OSError):  # it is not empty, or not there
                (self._sync_dir / name).rmdir()

    def _is_over(self, run: _Found) -> bool:
        if run.record is not None and run.record.is_over:
            return True
        is_alive = self._is_alive(run)
        return is_alive is False or (is_alive is None and self._now() - run.heard_at > KEEP_S)

    def _is_alive(self, run: _Found) -> bool | None:
        return None if run.record is None else self._processes.is_alive(run.record.process)

    def _found(self) -> list[_Found]:
        published = {path.name for name in DIRECTORIES.values() for path in _entries(self._sync_dir / name)}
        recorded = {path.stem for path in _entries(self._records) if path.suffix == ".json"}
        names = {name for name in published | recorded if _RUN.fullmatch(name)}
        return [_Found(name, self._read(name), self._heard_at(name)) for name in names]

    def _heard_at(self, run_id: str) -> float:
        """Publishing is a sign of life, and the only one of a run without a record."""
        places = [self._record_file(run_id), *(self._sync_dir / name / run_id for name in DIRECTORIES.values())]
        times = [0.0]
        for place in places:
            with suppress(OSError):
                times.append(place.lstat().st_mtime)
        return max(times)

    def _remove(self, run_id: str) -> None:
        """`sync_dir` is of the user's choice and may hold other things; only what a trainer made is removed."""
        for name in DIRECTORIES.values():
            directory = self._sync_dir / name / run_id
            if _is_published_run(directory):
                shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            self._record_file(run_id).unlink(missing_ok=True)

    def _record_file(self, run_id: str) -> Path:
        return self._records / f"{run_id}.json"

    def _read(self, run_id: str) -> _Record | None:
        try:
            return _Record.model_validate_json(self._record_file(run_id).read_bytes())
        except (OSError, ValidationError):
            return None

    def _write(self, run_id: str, record: _Record) -> None:
        file = self._record_file(run_id)
        temporary = file.with_suffix(".tmp")
        try:
            self._records.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(record.model_dump_json())
            temporary.chmod(0o600)
            temporary.replace(file)
        except OSError as error:
            _LOG.warning("%s was not noted: %s", run_id, error.strerror or error)
        else:
            self.heard(run_id)


def _entries(directory: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(directory.iterdir())


def _is_published_run(directory: Path) -> bool:
    """Whether a trainer made it: named like a run, and nothing in it but versions, published or being written."""
    return _is_directory_named(directory, _RUN) and all(
        _is_directory_named(entry, _VERSION) for entry in _entries(directory)
    )


def _is_directory_named(path: Path, pattern: re.Pattern[str]) -> bool:
    return pattern.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()
