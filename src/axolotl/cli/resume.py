"""Which checkpoint a run goes on from, and whether its config may. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from axolotl.core.run.checkpoints.finding import Needs, newest_verified, why_not
from axolotl.core.run.checkpoints.manifest import MANIFEST
from axolotl.core.run.checkpoints.settings import Changes, compare, read_record, record
from axolotl.core.run.checkpoints.store import RECORD, checkpoints, step_of
from axolotl.errors import ConfigError, StorageError
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import steps_per_rollout


def resume_wanted(config: AxolotlConfig, *, resume: bool | str, overwrite: bool) -> bool | str:
    """True for the newest checkpoint, the path of one, or False: from the flags, else from the config."""
    if resume and overwrite:
        raise ConfigError(
            "--resume and --overwrite contradict each other",
            why="one goes on with what an earlier run wrote, the other deletes it",
            do="give one of them",
        )
    return resume or (config.auto_resume_from_checkpoints and bool(checkpoints(Path(config.output_dir))))


def find_checkpoint(config: AxolotlConfig, resume: bool | str) -> Path | None:
    """The checkpoint to go on from, every byte verified; None when the run starts over.

    Raises:
        ConfigError: there is none, or the config is that of another run (`E-CFG-32`).
        StorageError: `E-STO-03` there are some, and none verifies.
    """
    if not resume:
        return None
    if config.trl.sync_ref_model:
        raise ConfigError(
            "--resume does not work with trl.sync_ref_model: true",
            why="checkpoints do not hold the reference model, which has moved since the run began",
            do="start over with --overwrite, or set trl.sync_ref_model: false",
        )
    needs = _rollout_files(config)
    checkpoint = _named(Path(resume), needs) if isinstance(resume, str) else _newest(Path(config.output_dir), needs)
    changes = compare(read_record(checkpoint), run_record(config))
    _refuse(changes, checkpoint)
    _say(f"resuming from {checkpoint}")
    for line in changes.allowed:
        _say(f"changed since then: {line}")
    return checkpoint


def run_record(config: AxolotlConfig, data: str | None = None) -> dict[str, Any]:
    """What the checkpoints of this run say about it. data: digest of its prompts, None while they are not read."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    return record(config.model_dump(mode="json"), num_processes=num_processes, data=data)


def check_data(checkpoint: Path, config: AxolotlConfig, data: str) -> None:
    """Raises `ConfigError` when the prompts are not those that the checkpoint was trained on."""
    _refuse(compare(read_record(checkpoint), run_record(config, data)), checkpoint)


def is_best_forgotten(checkpoint: Path, config: AxolotlConfig) -> bool:
    """Whether the checkpoint's best value is one of another metric than the config's, or best the other way round."""
    was = read_record(checkpoint)["config"]
    return any(was[name] != getattr(config, name) for name in ("metric_for_best_model", "greater_is_better"))


def _rollout_files(config: AxolotlConfig) -> Needs:
    """What the checkpoint of a step in the middle of a rollout has to hold: the rollout, which the next step trains."""

    def needed(checkpoint: Path) -> list[str]:
        is_between = step_of(checkpoint) % steps_per_rollout(config) == 0
        # Of a run with other settings nothing is asked: they are what is refused.
        was, now = read_record(checkpoint), run_record(config)
        if is_between or compare(was, now).refused:
            return []
        ranks = range(now["num_processes"])
        return [f"rollouts/rank-{rank}/open.{kind}" for rank in ranks for kind in ("json", "safetensors")]

    return needed


def _newest(output_dir: Path, needs: Needs) -> Path:
    found = newest_verified(output_dir, needs=needs)
    for skipped in found.skipped:
        _say(f"skipping {skipped}")
    if found.path is not None:
        return found.path
    if found.skipped:
        raise StorageError(
            f"--resume: no checkpoint in {output_dir} can be gone on from",
            code="E-STO-03",
            why=str(found.skipped[0]),
            do="start over with --overwrite, or copy a checkpoint back and rerun train with --resume",
        )
    raise ConfigError(
        f"--resume: there is no checkpoint in {output_dir}",
        why="no directory checkpoint-N is there",
        do="leave out --resume to start from the beginning",
    )


def _named(checkpoint: Path, needs: Needs) -> Path:
    if not (checkpoint / MANIFEST).is_file() and not (checkpoint / "trainer_state.json").is_file():
        raise ConfigError(
            f"--resume {checkpoint}: this is no checkpoint that can be resumed",
            why="it holds no trainer_state.json",
            do="give a directory checkpoint-N of a run with save_only_model: false",
        )
    problems = why_not(checkpoint, needs=needs)
    if problems:
        raise StorageError(
            f"--resume {checkpoint}: this checkpoint cannot be gone on from",
            code="E-STO-03",
            why=str(problems[0]),
            do="give another one, or --resume for the newest that verifies",
            details=tuple(f"{checkpoint}: {problem}" for problem in problems),
        )
    return checkpoint


def _refuse(changes: Changes, checkpoint: Path) -> None:
    if not changes.refused:
        return
    count = "1 setting is" if len(changes.refused) == 1 else f"{len(changes.refused)} settings are"
    raise ConfigError(
        f"--resume {checkpoint}: {count} not what the run began with",
        code="E-CFG-32",
        why="listed above as it was -> as it is; going on would make it another run",
        do=f"set them as they were ({checkpoint / RECORD} has all of them), or start over with --overwrite",
        details=changes.refused,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
