"""The checkpoints of one output directory: complete under their names, and the newest good ones are kept.

    .tmp-checkpoint-40/checkpoint-40   ─► every file fsynced ─► manifest.json ─► directories fsynced
      └─ rename ─► checkpoint-40 ─► output directory fsynced ─► older ones beyond the limit removed

Killed anywhere, the run leaves older checkpoints as they were. `recover` settles what a killed run left: a checkpoint
that was complete gets its name, the rest is deleted. One that fails to be written is deleted at once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from axolotl import failpoints
from axolotl.core.run.checkpoints.manifest import MANIFEST, ManifestError, read_manifest, seal, sync_directory, verify
from axolotl.core.run.checkpoints.ranks import OneRank, Ranks
from axolotl.errors import StorageError

RECORD = "run.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = ".tmp-checkpoint-"
_STAGED = re.compile(re.escape(_TEMPORARY) + r"(\d+)")


def step_of(checkpoint: Path) -> int:
    """The optimizer step in the name of a checkpoint, -1 where the name is none."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def checkpoints(output_dir: Path) -> list[Path]:
    """Directories named `checkpoint-N`, sound or not, by step."""
    if not output_dir.is_dir():
        return []
    return sorted((item for item in output_dir.iterdir() if step_of(item) >= 0 and item.is_dir()), key=step_of)


def temporaries(output_dir: Path) -> list[Path]:
    """What runs that were killed while they saved or removed a checkpoint left behind."""
    return sorted(output_dir.glob(f"{_TEMPORARY}*"))


class CheckpointStore:
    """Where a run saves. One thread, one process a rank; the run holds the directory's lock.

    Args:
        limit: how many checkpoints are kept, all when None.
        record: what the checkpoint says about the run, for whoever goes on from it (see `settings.py`).
        announce: told the names that are about to appear in the output directory.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        limit: int | None = None,
        record: Mapping[str, Any] | None = None,
        announce: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._output_dir = output_dir
        self._limit = limit
        self._record = record
        self._announce = announce

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self._output_dir / f"checkpoint-{step}"

    def save(self, step: int, write: Callable[[Path], None], ranks: Ranks | None = None) -> Path:
        """Publish `checkpoint-N` with what `write` puts into the directory it is given, on every rank.

        Raises:
            StorageError: `E-STO-01` it cannot be written. Older checkpoints are as they were.
            PeerError: another rank could not write its part.
        """
        ranks = ranks or OneRank()
        staged = self._output_dir / f"{_TEMPORARY}{step}" / self.path(step).name
        try:
            with _named_failures(self._output_dir, step):
                ranks.alone(lambda: self._prepare(staged))
                ranks.together(lambda: write(staged))
                ranks.alone(lambda: self._publish(staged, step))
        except BaseException:
            if ranks.is_main:
                shutil.rmtree(staged.parent, ignore_errors=True)
            raise
        return self.path(step)

    def prune(self, newest: Path, *, best: str | None = None) -> None:
        """Remove checkpoints beyond the limit: damaged ones first, then those of steps that are yet to come again, then
        the oldest. `newest` and `best` stay, and so does every directory without a manifest, which is not ours.

        Raises:
            StorageError: `E-STO-03` the newest does not verify; then nothing is removed.
        """
        others = [item for item in checkpoints(self._output_dir) if item != newest and (item / MANIFEST).is_file()]
        surplus = 0 if self._limit is None else len(others) + 1 - self._limit
        removable = [item for item in others if best is None or not _is_same(item, best)]
        if surplus <= 0 or not removable:
            return
        problems = verify(newest)
        if problems:
            raise StorageError(
                f"{newest} does not verify right after it was saved",
                code="E-STO-03",
                why=f"{problems[0]}; the older checkpoints are kept",
                do="check the disk, then rerun train with --resume",
            )
        try:
            failpoints.point("ckpt.before_prune")
            for checkpoint in _by_worth(removable, newest)[:surplus]:
                _remove(checkpoint)
            failpoints.point("ckpt.after_prune")
        except OSError as error:
            # Too many checkpoints are no reason to stop training.
            print(f"warning: older checkpoints could not be removed: {error}", file=sys.stderr, flush=True)

    def recover(self) -> list[str]:
        """Settle what killed runs left under temporary names; returns a line for each checkpoint that got its name."""
        lines = []
        for temporary in temporaries(self._output_dir):
            match = _STAGED.fullmatch(temporary.name)
            final = self.path(int(match[1])) if match else None
            if final is not None and not final.exists() and not verify(temporary / final.name):
                os.rename(temporary / final.name, final)
                sync_directory(self._output_dir)
                lines.append(f"{final} was complete and has its name now; the run was killed before it could rename it")
            shutil.rmtree(temporary, ignore_errors=True)
        return lines

    def _prepare(self, staged: Path) -> None:
        failpoints.point("ckpt.start")
        self._announce(self.path(step_of(staged)).name)
        shutil.rmtree(staged.parent, ignore_errors=True)
        staged.mkdir(parents=True)
        if self._record is not None:
            (staged / RECORD).write_text(json.dumps(self._record, indent=1) + "\n")

    def _publish(self, staged: Path, step: int) -> None:
        failpoints.point("ckpt.before_manifest")
        seal(staged, step)
        failpoints.point("ckpt.before_rename")
        final = self.path(step)
        replaced = self._set_aside(final, staged.parent) if final.exists() else None
        try:
            os.rename(staged, final)
            failpoints.point("ckpt.after_rename")
            sync_directory(self._output_dir)
        except BaseException:
            if replaced is not None and not final.exists():
                os.rename(replaced, final)
            raise
        shutil.rmtree(staged.parent, ignore_errors=True)

    def _set_aside(self, existing: Path, beside: Path) -> Path:
        """An earlier run, or a part of this one that is done again, left a checkpoint of this step. It goes; with
        anything in it that its manifest does not list, it stays under another name."""
        if _is_only_ours(existing):
            place = beside / "replaced"
        else:
            numbers = (existing.with_name(f"{existing.name}.replaced-{number}") for number in range(1, 10_000))
            place = next(path for path in numbers if not path.exists())
        os.rename(existing, place)
        return place


def _by_worth(removable: list[Path], newest: Path) -> list[Path]:
    """The least worth keeping first."""

    def worth(checkpoint: Path) -> tuple[bool, bool, int]:
        is_sound = not verify(checkpoint, contents=False)
        return is_sound, step_of(checkpoint) <= step_of(newest), step_of(checkpoint)

    return sorted(removable, key=worth)


def _remove(checkpoint: Path) -> None:
    """Under another name first, so that no half-deleted directory is ever taken for a checkpoint."""
    going = checkpoint.with_name(f"{_TEMPORARY}{step_of(checkpoint)}.removed")
    shutil.rmtree(going, ignore_errors=True)
    os.rename(checkpoint, going)
    shutil.rmtree(going)


def _is_same(checkpoint: Path, other: str) -> bool:
    with suppress(OSError):
        return checkpoint.samefile(other)
    return False


def _is_only_ours(checkpoint: Path) -> bool:
    try:
        listed = read_manifest(checkpoint).keys() | {MANIFEST}
    except (OSError, ManifestError):
        return False
    files = (item for item in checkpoint.rglob("*") if not item.is_dir())
    return all(item.relative_to(checkpoint).as_posix() in listed for item in files)


@contextmanager
def _named_failures(output_dir: Path, step: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or is_failed_write(error)):
            raise
        raise StorageError(
            f"the checkpoint of step {step} could not be written in {output_dir}",
            why=f"{_first_line(error)}{_free(output_dir)}; older checkpoints are intact",
            do="free space or set save_total_limit, then rerun train with --resume",
        ) from error


def is_failed_write(error: Exception) -> bool:
    """torch and safetensors report a write that failed under names of their own."""
    text = str(error)
    if isinstance(error, RuntimeError):
        return "PytorchStreamWriter failed" in text or "unexpected pos" in text
    return type(error).__name__ == "SafetensorError" and "I/O error" in text


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _free(output_dir: Path) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(output_dir).free // 2**20} MB free)"
    return ""
