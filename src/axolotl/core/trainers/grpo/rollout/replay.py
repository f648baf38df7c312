"""Groups that taught something, kept to stand in for groups that teach nothing.

    score ─► scored_groups ─► replace_zero_signal ─► collate, advantages, micro-batches
                                   ▲ draw
             ReplayBuffer ◄────────┴── add, when the step has been trained

Main thread. Every rank has a buffer of its own groups; its size is the rank's share of `replay_buffer_size`. A group
that was drawn stays until it is too old or stronger ones take its place. What is kept are tokens, rewards and the
sampler's log-probs; whatever depends on the policy of the moment is computed anew by whoever trains on the group.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from axolotl.core.trainers.grpo.algo.advantages import Advantages, AdvantageSpec
from axolotl.core.trainers.grpo.algo.signal import group_signal
from axolotl.core.trainers.grpo.types import CompletionGroup


@dataclass(frozen=True)
class ReplayGroup:
    """A scored group on the CPU, as plain numbers.

    rewards: `[G][F]` float32 values, NaN where a function abstained. step: the optimizer step it was first scored in.
    signal: see `group_signal`; 0 where it has none. policy_logps: `[G][c]` of the policy of that step, or None when
    replayed groups are scored again.
    """

    group: CompletionGroup
    rewards: tuple[tuple[float, ...], ...]
    step: int
    signal: float
    policy_logps: tuple[tuple[float, ...], ...] | None = None

    @property
    def version(self) -> int:
        """The oldest policy that sampled any of it."""
        return min(completion.adapter_version for completion in self.group.completions)

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells it from every other group of a rank: step, row and how often the prompt was drawn again."""
        return self.step, self.group.row.index, self.group.reroll


def scored_groups(
    groups: Sequence[CompletionGroup],
    values: torch.Tensor,
    advantages: Advantages,
    spec: AdvantageSpec,
    step: int,
) -> list[ReplayGroup]:
    """The groups with what was made of them in optimizer step `step`.

    Args:
        values: `[N, F]` rewards of these groups, in order.
    """
    signals = group_signal(values, advantages, spec).tolist()
    by_group = values.float().view(len(groups), spec.group_size, -1).tolist()
    return [
        ReplayGroup(group, tuple(tuple(row) for row in rewards), step, signal)
        for group, rewards, signal in zip(groups, by_group, signals, strict=True)
    ]


def rewards_of(groups: Iterable[ReplayGroup]) -> torch.Tensor:
    """`[N, F]` float32 rewards of whole groups, in order: what advantages are computed from, in any batch."""
    return torch.tensor([row for group in groups for row in group.rewards], dtype=torch.float32)


def with_policy_logps(group: ReplayGroup, logps: torch.Tensor, mask: torch.Tensor) -> ReplayGroup:
    """The group with its log-probs under the policy it was first trained with.

    Args:
        logps, mask: `[G, C]`, the rows of this group in its batch; mask is `completion_mask`.
    """
    rows = zip(logps.detach().float().cpu(), mask.bool().cpu(), strict=True)
    return replace(group, policy_logps=tuple(tuple(row[kept].tolist()) for row, kept in rows))


def stored_logps_of(groups: Sequence[ReplayGroup], width: int) -> torch.Tensor | None:
    """`[N, width]` stored log-probs, NaN on padding and in groups without; None when no group has any.

    width: of the batch's `completion_ids`.
    """
    if all(group.policy_logps is None for group in groups):
        return None
    rows = [
        (*logps, *(math.nan for _ in range(width - len(logps))))
        for group in groups
        for logps in group.policy_logps or [()] * len(group.rewards)
    ]
    return torch.tensor(rows, dtype=torch.float32)


@dataclass(frozen=True)
class ReplaySpec:
    """capacity: groups of this rank, its `rank_share` of the total. max_age: optimizer steps after the first scoring.
    seed, rank: what drawing depends on, with the step."""

    capacity: int
    max_age: int
    seed: int
    rank: int = 0


class ReplayBuffer:
    """At most `spec.capacity` groups with signal, in the order they came."""

    def __init__(self, spec: ReplaySpec, groups: Iterable[ReplayGroup] = ()) -> None:
        self.spec = spec
        self._groups: tuple[ReplayGroup, ...] = ()
        self._keep(tuple(groups))

    @property
    def groups(self) -> tuple[ReplayGroup, ...]:
        return self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def restore(self, groups: Iterable[ReplayGroup]) -> None:
        """Go on with what a checkpoint kept."""
        self._keep(tuple(groups))

    def add(self, groups: Iterable[ReplayGroup], step: int) -> None:
        """Learn the groups of a step that has been trained; those without signal are passed over.

        Their order makes no difference, since it may be the one in which a server finished them.
        What is too old for the next step goes. Then, as long as there are too many, the weakest goes, and among
        equally strong ones the oldest.
        """
        with_signal = sorted((group for group in groups if group.signal > 0.0), key=lambda group: group.key)
        learned = (*self._groups, *with_signal)
        assert len({group.key for group in learned}) == len(learned), "a group was added twice"
        self._keep(tuple(group for group in learned if step + 1 - group.step <= self.spec.max_age))

    def _keep(self, groups: tuple[ReplayGroup, ...]) -> None:
        surplus = max(0, len(groups) - self.spec.capacity)
        # Stable, so the order among equals is the order they came in.
        weakest = set(sorted(range(len(groups)), key=lambda i: groups[i].signal)[:surplus])
        self._groups = tuple(group for i, group in enumerate(groups) if i not in weakest)

    def draw(self, count: int, step: int, *, skip: int = 0) -> tuple[ReplayGroup, ...]:
        """Up to `count` different groups of earlier steps that are not too old; stronger ones come up more often.

        A function of the buffer, `spec.seed`, `spec.rank` and the step. The chance of being next is the group's share
        of the signal of those that are left.

        Args:
            skip: how many were drawn in this step already, so that a batch drawn in pieces is the same batch.
        """
        eligible = [group for group in self._groups if 1 <= step - group.step <= self.spec.max_age]
        chance = random.Random(f"replay/{self.spec.seed}/{step}/{self.spec.rank}")
        # Exponential waiting times at rates in proportion to the signal end in just this order.
        waits = [-math.log(1.0 - chance.random()) / group.signal for group in eligible]
        order = sorted(range(len(eligible)), key=waits.__getitem__)
        return tuple(eligible[i] for i in order[skip : skip + count])


@dataclass(frozen=True)
class Origin:
    """Where a group of a batch comes from. step: the optimizer step it was first scored in. age: steps since then, 0
    for a fresh group."""

    step: int
    age: int

    @property
    def is_replayed(self) -> bool:
        return self.age > 0


@dataclass(frozen=True)
class ReplacedBatch:
    """groups: what is trained, one for each group of the batch. origins: of each. displaced: the places where a
    replayed group stands; the fresh ones that were there are the ledger's zero-signal groups."""

    groups: tuple[ReplayGroup, ...]
    origins: tuple[Origin, ...]
    displaced: tuple[int, ...]


def replace_zero_signal(
    fresh: Sequence[ReplayGroup], buffer: ReplayBuffer, step: int, *, skip: int = 0
) -> ReplacedBatch:
    """The batch with groups of the buffer in place of those without signal, as far as it has enough.

    Changes neither. The advantages have to be computed again, from `rewards_of(result.groups)`: with `scale: batch`
    and `normalize_then_sum` a replayed group is measured by the batch in which it now stands.

    Args:
        fresh: groups of this step, in order. skip: see `ReplayBuffer.draw`.
    """
    empty = [place for place, group in enumerate(fresh) if group.signal <= 0.0]
    replayed = dict(zip(empty, buffer.draw(len(empty), step, skip=skip), strict=False))
    groups = tuple(replayed.get(place, group) for place, group in enumerate(fresh))
    return ReplacedBatch(
        groups=groups,
        origins=tuple(Origin(group.step, step - group.step) for group in groups),
        displaced=tuple(replayed),
    )


def replay_metrics(batch: ReplacedBatch, buffer: ReplayBuffer) -> dict[str, float]:
    """Groups in the buffer, groups replayed and their ages in optimizer steps, on this rank."""
    ages = [origin.age for origin in batch.origins if origin.is_replayed]
    metrics = {"replay/size": float(len(buffer)), "replay/replaced": float(len(ages))}
    if ages:
        metrics |= {"replay/age_mean": sum(ages) / len(ages), "replay/age_max": float(max(ages))}
    return metrics


def join_replay_metrics(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Those of all ranks: sums, and the ages of all groups that were replayed."""
    joined = {name: sum(rank[name] for rank in ranks) for name in ("replay/size", "replay/replaced")}
    if aged := [rank for rank in ranks if "replay/age_max" in rank]:
        ages = sum(rank["replay/age_mean"] * rank["replay/replaced"] for rank in aged)
        joined["replay/age_mean"] = ages / joined["replay/replaced"]
        joined["replay/age_max"] = max(rank["replay/age_max"] for rank in aged)
    return joined
