"""Which checkpoint a run goes on from: the newest that verifies, and why others were skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from axolotl.core.run.checkpoints.manifest import MANIFEST, Problem, verify
from axolotl.core.run.checkpoints.store import checkpoints

# Without these, going on would be another run: same weights, other optimizer, schedule and position.
_NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")


# Further files that going on from a checkpoint which verifies takes.
Needs = Callable[[Path], Sequence[str]]


def nothing_more(checkpoint: Path) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Skipped:
    path: Path
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        shown = "; ".join(str(problem) for problem in self.problems[:3])
        more = len(self.problems) - 3
        return f"{self.path}: {shown}" + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Found:
    """path: None when none can be gone on from. skipped: newer ones that cannot, newest first."""

    path: Path | None
    skipped: tuple[Skipped, ...]


def newest_verified(output_dir: Path, *, contents: bool = True, needs: Needs = nothing_more) -> Found:
    """Reads checkpoints from the newest to the first that is whole. contents: as in `verify`."""
    skipped: list[Skipped] = []
    for checkpoint in reversed(checkpoints(output_dir)):
        problems = why_not(checkpoint, contents=contents, needs=needs)
        if not problems:
            return Found(checkpoint, tuple(skipped))
        skipped.append(Skipped(checkpoint, tuple(problems)))
    return Found(None, tuple(skipped))


def why_not(checkpoint: Path, *, contents: bool = True, needs: Needs = nothing_more) -> list[Problem]:
    """What keeps a run from going on from `checkpoint`; empty when nothing does."""
    problems = verify(checkpoint, contents=contents)
    if problems and problems[0].file == MANIFEST and problems[0].what == "is missing":
        hint = "is missing: no checkpoint, or one of an older version of axolotl"
        return [Problem(MANIFEST, hint)]
    lacking = [name for name in _NEEDED if not (checkpoint / name).is_file()]
    named = {problem.file for problem in problems}
    problems += [Problem(name, "was not saved (save_only_model)") for name in lacking if name not in named]
    if problems:
        return problems
    return [Problem(name, "was not saved") for name in needs(checkpoint) if not (checkpoint / name).is_file()]
