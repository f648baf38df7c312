"""From an order to its groups: rows, seeds, and whoever generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from axolotl.core.trainers.grpo.protocols import GenerationBackend
from axolotl.core.trainers.grpo.rollout.seeds import completion_seed
from axolotl.core.trainers.grpo.types import CompletionGroup, Order, PromptRow
from axolotl.serving.wire import Sampling


@dataclass(frozen=True)
class GroupMaker:
    """Has no state: an order that is made a second time has the same seeds. May run where its backend may."""

    rows: Sequence[PromptRow]
    backend: GenerationBackend
    sampling: Sampling
    run_seed: int

    def make(self, order: Order) -> Iterator[tuple[int, CompletionGroup]]:
        """Each group as it finishes, with its place in the order."""
        rows = [self.rows[slot.row] for slot in order.slots]
        seeds = [
            [completion_seed(self.run_seed, order.epoch, row.index, i, slot.reroll) for i in range(self.sampling.n)]
            for row, slot in zip(rows, order.slots, strict=True)
        ]
        for place, group in self.backend.generate(rows, seeds, self.sampling, order.version):
            yield place, replace(group, reroll=order.slots[place].reroll)
