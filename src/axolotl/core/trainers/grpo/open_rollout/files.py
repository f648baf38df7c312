"""A rollout in the middle of its optimizer steps, as files of a checkpoint: the next step is what it would have been.

Rewards and advantages are stored as they came out, since they may depend on all of the rollout; the log-probs are those
of a policy that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from axolotl.core.trainers.grpo.algo.advantages import Advantages
from axolotl.core.trainers.grpo.open_rollout.parts import OpenRollout, Part
from axolotl.core.trainers.grpo.rollout.group_files import (
    Record,
    Tensors,
    pack_groups,
    read_state,
    unpack_groups,
    write_state,
)
from axolotl.core.trainers.grpo.rollout.replay import Origin, ReplacedBatch, ReplayGroup, rewards_of
from axolotl.core.trainers.grpo.scoring import Collate, Scorer, TrainedBatch
from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow

_NAME = "open"
_ADVANTAGES = ("values", "rewards", "has_signal", "is_unscorable")


def save_open(rollout: OpenRollout, directory: Path) -> None:
    """`open.json` and `open.safetensors` in `directory`, which is this rank's and exists."""
    groups = [group for part in rollout.parts for group in (*part.scored.batch.groups, *_standing_in(part))]
    records, tensors = pack_groups(groups)
    for number, part in enumerate(rollout.parts):
        tensors |= {f"{number}.{name}": value for name, value in _tensors(part).items()}
    parts = [_record(part) for part in rollout.parts]
    write_state(directory, _NAME, {"step": rollout.step, "parts": parts, "groups": records}, tensors)


def load_open(directory: Path, rows: Sequence[PromptRow], scorer: Scorer, collate: Collate) -> OpenRollout | None:
    """The rollout again; None where the checkpoint holds none. rows: see `unpack_groups`."""
    if not (directory / f"{_NAME}.json").is_file():
        return None
    record, tensors = read_state(directory, _NAME)
    groups = iter(unpack_groups(record["groups"], tensors, rows))
    parts = [
        _part(entry, _of_part(tensors, number), groups, scorer, collate) for number, entry in enumerate(record["parts"])
    ]
    return OpenRollout(record["step"], parts)


def _standing_in(part: Part) -> list[CompletionGroup]:
    """The groups that are trained in the place of others."""
    return [] if part.replaced is None else [part.replaced.groups[place].group for place in part.replaced.displaced]


def _record(part: Part) -> Record:
    replaced = part.replaced
    return {
        "number": part.number,
        "is_taken": part.is_taken,
        "is_counted": part.is_counted,
        "num_groups": len(part.scored.batch.groups),
        "has_part": list(part.has_part.items()),
        "displaced": None if replaced is None else replaced.displaced,
        "origins": None if replaced is None else [(origin.step, origin.age) for origin in replaced.origins],
    }


def _tensors(part: Part) -> Tensors:
    tensors = {"rewards": part.scored.result.values, **_advantage_tensors("scored", part.scored.advantages)}
    tensors |= _advantage_tensors("trained", part.trained.advantages)
    tensors |= {f"logps.{row}": logps for row, logps in part.logps.items()}
    if part.trained.stored_logps is not None:
        tensors["stored_logps"] = part.trained.stored_logps
    if part.replaced is not None:
        tensors["trained_rewards"] = rewards_of(part.replaced.groups)
    # What shares memory, such as the rows of a batch, cannot be saved as it is.
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def _advantage_tensors(prefix: str, advantages: Advantages) -> Tensors:
    return {f"{prefix}.{name}": getattr(advantages, name) for name in _ADVANTAGES}


def _of_part(tensors: Tensors, number: int) -> Tensors:
    prefix = f"{number}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _part(entry: Record, tensors: Tensors, groups: Iterator[CompletionGroup], scorer: Scorer, collate: Collate) -> Part:
    made = [next(groups) for _ in range(entry["num_groups"])]
    scored = scorer.restored(collate(made), tensors["rewards"], _advantages("scored", tensors))
    trained, replaced = list(made), None
    if entry["displaced"] is not None:
        for place in entry["displaced"]:
            trained[place] = next(groups)
        replaced = _replaced(entry, tensors["trained_rewards"], trained)
    batch = collate(trained) if entry["displaced"] else scored.batch
    prefix = "logps."
    return Part(
        scored=scored,
        trained=TrainedBatch(batch, _advantages("trained", tensors), tensors.get("stored_logps")),
        replaced=replaced,
        logps={int(name.removeprefix(prefix)): value for name, value in tensors.items() if name.startswith(prefix)},
        number=entry["number"],
        has_part=dict(entry["has_part"]),
        is_taken=entry["is_taken"],
        is_counted=entry["is_counted"],
    )


def _advantages(prefix: str, tensors: Tensors) -> Advantages:
    return Advantages(**{name: tensors[f"{prefix}.{name}"] for name in _ADVANTAGES})


def _replaced(entry: Record, rewards: torch.Tensor, groups: Sequence[CompletionGroup]) -> ReplacedBatch:
    """What the ledger and the journal ask of it: the replay buffer has learned the rest already."""
    size, values = len(groups[0].completions), rewards.tolist()
    origins = tuple(Origin(step, age) for step, age in entry["origins"])
    kept = tuple(
        ReplayGroup(group, _rows(values[place * size : (place + 1) * size]), origin.step, signal=0.0)
        for place, (group, origin) in enumerate(zip(groups, origins, strict=True))
    )
    return ReplacedBatch(kept, origins, tuple(entry["displaced"]))


def _rows(values: list[list[Any]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values)
