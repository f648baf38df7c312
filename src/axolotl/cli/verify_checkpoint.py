"""`axolotl verify-checkpoint`: whether checkpoints are what was saved. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from axolotl.core.run.checkpoints.manifest import MANIFEST, ManifestError, Problem, read_manifest, verify
from axolotl.core.run.checkpoints.store import checkpoints
from axolotl.errors import ConfigError, StorageError


def run(directory: Path) -> None:
    """Prints a line for each checkpoint.

    directory: a checkpoint, or an output directory. Raises `ConfigError` where there is none, `StorageError` `E-STO-03`
    where one is damaged.
    """
    found = checkpoints(directory)
    if (
        not found
        and directory.is_dir()
        and any((directory / name).exists() for name in (MANIFEST, "trainer_state.json"))
    ):
        found = [directory]
    if not found:
        raise ConfigError(
            f"{directory} is no checkpoint and holds none",
            why=f"there is neither {MANIFEST} nor a directory checkpoint-N",
            do="give a checkpoint or the output_dir of a run",
        )
    damaged = [checkpoint for checkpoint in found if not _verify(checkpoint)]
    if damaged:
        raise StorageError(
            f"{len(damaged)} of {len(found)} checkpoints cannot be relied on",
            code="E-STO-03",
            why="listed above, one file a line",
            do="train --resume skips them and goes on from the newest that verifies",
        )


def _verify(checkpoint: Path) -> bool:
    problems = verify(checkpoint)
    if problems:
        print(f"{checkpoint}: damaged", *(f"  {_told(problem)}" for problem in problems), sep="\n")
    else:
        print(f"{checkpoint}: complete, {_size(checkpoint)}")
    return not problems


def _told(problem: Problem) -> str:
    hint = ": cut short, or saved by an older version of axolotl"
    return f"{problem}{hint if problem.file == MANIFEST and 'missing' in problem.what else ''}"


def _size(checkpoint: Path) -> str:
    try:
        entries = read_manifest(checkpoint)
    except (OSError, ManifestError):
        return "removed meanwhile"
    return f"{len(entries)} files, {sum(entry['bytes'] for entry in entries.values()) / 2**20:.1f} MB"
