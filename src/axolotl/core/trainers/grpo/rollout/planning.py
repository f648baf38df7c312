"""Which groups a rollout consists of, decided on the main thread before they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axolotl.core.trainers.grpo.rollout.rank_shares import rank_share
from axolotl.core.trainers.grpo.rollout.reroll import RerollQueue, slots
from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.types import CompletionGroup, Order, Slot


@dataclass(frozen=True)
class Planner:
    """num_steps: optimizer steps of the run; nothing is ordered beyond them. reroll: failed prompts to try again."""

    sampler: GroupSampler
    num_steps: int
    reroll: Reroll | None = None

    def plan(self, step: int, version: int) -> Order:
        """The order of the rollout that begins with optimizer step `step`."""
        fresh = self.sampler.indices(step)
        taken = () if self.reroll is None else self.reroll.take(step, fresh, turn=step // self.sampler.span.length)
        return Order(step, self.sampler.epoch_of(step), version, slots(fresh, taken))


@dataclass(frozen=True)
class Reroll:
    """max_groups: prompts tried again in a rollout, over all ranks. threshold: the weighted reward of a failure."""

    queue: RerollQueue
    max_groups: int
    threshold: float
    num_ranks: int = 1
    rank: int = 0

    def take(self, step: int, fresh: Sequence[int], *, turn: int) -> tuple[Slot, ...]:
        """turn: the number of the rollout."""
        limit = rank_share(self.max_groups, self.num_ranks, self.rank, turn=turn)
        return self.queue.take(step, min(limit, len(fresh)), exclude=fresh)

    def learn(self, groups: Sequence[CompletionGroup], rewards: torch.Tensor) -> None:
        """All groups of a rollout, with their weighted rewards `[N]`."""
        self.queue.learn(groups, rewards.view(len(groups), -1), self.threshold)
