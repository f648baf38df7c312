"""What a step trains in place of its groups without signal, and what the buffer learns from it.

part of a step ─► Replay.stand_in ─► what is trained        once the step is over: Replay.learn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec, compute_advantages
from axolotl.core.trainers.grpo.rollout.replay import (
    Origin,
    ReplacedBatch,
    ReplayBuffer,
    ReplayGroup,
    replace_zero_signal,
    replay_metrics,
    rewards_of,
    scored_groups,
    stored_logps_of,
    with_policy_logps,
)
from axolotl.core.trainers.grpo.scoring import Collate, ScoredBatch, TrainedBatch


@dataclass(frozen=True)
class Replay:
    """recomputes: replayed groups get the log-probs of the present policy, else of the one that first trained them."""

    buffer: ReplayBuffer
    spec: AdvantageSpec
    recomputes: bool

    def stand_in(
        self, scored: ScoredBatch, collate: Collate, step: int, *, skip: int
    ) -> tuple[TrainedBatch, list[ReplayGroup], ReplacedBatch]:
        """What is trained, the fresh groups as the buffer will learn them, and what was replaced.

        Args:
            skip: groups that earlier parts of this step were given.
        """
        fresh = scored_groups(scored.batch.groups, scored.result.values, scored.advantages, self.spec, step)
        replaced = replace_zero_signal(fresh, self.buffer, step, skip=skip)
        if not replaced.displaced:
            return TrainedBatch(scored.batch, scored.advantages), fresh, replaced
        batch = collate([item.group for item in replaced.groups])
        advantages = compute_advantages(rewards_of(replaced.groups), self.spec)
        stored = None if self.recomputes else stored_logps_of(replaced.groups, batch.completion_ids.shape[1])
        return TrainedBatch(batch, advantages, stored), fresh, replaced

    def learn(self, fresh: Sequence[ReplayGroup], step: int) -> None:
        self.buffer.add(fresh, step)

    def metrics(self, parts: Sequence[ReplacedBatch]) -> dict[str, float]:
        groups: tuple[ReplayGroup, ...] = ()
        origins: tuple[Origin, ...] = ()
        for part in parts:
            groups, origins = (*groups, *part.groups), (*origins, *part.origins)
        return replay_metrics(ReplacedBatch(groups, origins, ()), self.buffer)


def with_logps(fresh: Sequence[ReplayGroup], batch: TrainedBatch, logps: dict[int, torch.Tensor]) -> list[ReplayGroup]:
    """The groups with the log-probs that training found, where it ran them.

    Args:
        logps: `[C]` by row of `batch`, which holds the fresh groups at their places.
    """
    size = batch.batch.group_size
    width = batch.batch.completion_ids.shape[1]
    found = []
    for place, group in enumerate(fresh):
        rows = range(place * size, (place + 1) * size)
        if batch.batch.groups[place] is not group.group or not all(row in logps for row in rows):
            found.append(group)
            continue
        padded = torch.stack([_padded(logps[row], width) for row in rows])
        found.append(with_policy_logps(group, padded, batch.batch.completion_mask[list(rows)]))
    return found


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[0]))
