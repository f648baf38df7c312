"""The rollout that is being trained, from its first optimizer step to its last: chunks of it, cut into slices.

chunk of groups, scored ─► by_slice ─► Part ─┬─► this step's slice: micro-batches at once
                                             └─► later slices: log-probs of the policy of now, then they wait
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from axolotl.core.trainers.grpo.rollout.replay import ReplacedBatch, ReplayGroup
from axolotl.core.trainers.grpo.scoring import Collate, ScoredBatch, TrainedBatch, select
from axolotl.core.trainers.grpo.span import Span


@dataclass
class Part:
    """Groups of one slice that were scored together.

    scored: the groups that were made. trained: what stands for them in training. logps: `[c]` by row of `trained`,
    under the policy at the rollout's first step, where they are kept. number: of the slice. has_part: by row of
    `trained` that was run, whether it had a part in the policy's loss of any step. is_taken: the optimizer took one of
    the steps that trained it. is_counted: the ledger has it.
    """

    scored: ScoredBatch
    trained: TrainedBatch
    fresh: list[ReplayGroup] = field(default_factory=list)
    replaced: ReplacedBatch | None = None
    logps: dict[int, torch.Tensor] = field(default_factory=dict)
    number: int = 0
    has_part: dict[int, bool] = field(default_factory=dict)
    is_taken: bool = False
    is_counted: bool = False

    @property
    def num_replayed(self) -> int:
        """Completions of earlier steps that are trained here, in place of as many of its own."""
        origins = self.replaced.origins if self.replaced is not None else ()
        return sum(origin.is_replayed for origin in origins) * self.trained.batch.group_size

    def note(self, row: int, *, is_left_out: bool) -> None:
        """What a step's loss did with `row`."""
        self.has_part[row] = self.has_part.get(row, False) or not is_left_out

    def as_old(self) -> TrainedBatch:
        """`trained` for the steps after the first, when the policy is another than it was: with the kept log-probs as
        the old ones. What the replay buffer brought with a group stays the group's own.

        Padding has none: a ratio of two policies there means nothing, and might be too large for the mask to remove.
        """
        mask = self.trained.batch.completion_mask.bool()
        old = torch.full(mask.shape, torch.nan)
        for row, logps in self.logps.items():
            old[row, : logps.shape[0]] = logps
        old = old.masked_fill(~mask, torch.nan)
        if self.trained.stored_logps is not None:
            old = torch.where(self.trained.stored_logps.isnan(), old, self.trained.stored_logps)
        return replace(self.trained, stored_logps=old)


@dataclass
class OpenRollout:
    """step: the optimizer step it began with, which saw all `parts` of it."""

    step: int
    parts: list[Part]

    def slice(self, number: int) -> list[Part]:
        return [part for part in self.parts if part.number == number]

    def is_for(self, step: int, span: Span) -> bool:
        return span.first(step) == self.step


def by_slice(part: Part, places: Sequence[int], groups_per_slice: int, collate: Collate) -> list[Part]:
    """A chunk cut into the slices that its groups belong to.

    Args:
        places: of the chunk's groups in the order of the rollout.
    """
    chosen: dict[int, list[int]] = {}
    for index, place in enumerate(places):
        chosen.setdefault(place // groups_per_slice, []).append(index)
    if len(chosen) == 1:
        return [replace(part, number=next(iter(chosen)))]
    return [replace(_select(part, indices, collate), number=number) for number, indices in sorted(chosen.items())]


def _select(part: Part, indices: Sequence[int], collate: Collate) -> Part:
    scored = select(part.scored, indices, collate)
    return Part(
        scored=scored,
        trained=_select_trained(part, scored, indices, collate),
        fresh=[part.fresh[i] for i in indices] if part.fresh else [],
        replaced=None if part.replaced is None else _select_replaced(part.replaced, indices),
    )


def _select_trained(part: Part, scored: ScoredBatch, indices: Sequence[int], collate: Collate) -> TrainedBatch:
    trained, size = part.trained, part.trained.batch.group_size
    advantages = trained.advantages.of_groups(indices, size)
    if trained.batch is part.scored.batch:
        return TrainedBatch(scored.batch, advantages)
    batch = collate([trained.batch.groups[i] for i in indices])
    stored = trained.stored_logps
    if stored is not None:
        rows = [row for i in indices for row in range(i * size, (i + 1) * size)]
        stored = stored[rows, : batch.completion_ids.shape[1]]
    return TrainedBatch(batch, advantages, stored)


def _select_replaced(replaced: ReplacedBatch, indices: Sequence[int]) -> ReplacedBatch:
    return ReplacedBatch(
        groups=tuple(replaced.groups[i] for i in indices),
        origins=tuple(replaced.origins[i] for i in indices),
        displaced=tuple(new for new, i in enumerate(indices) if i in replaced.displaced),
    )
