"""Which groups an optimizer step trains on, decided on the main thread before they are made."""

from __future__ import annotations

from dataclasses import dataclass

from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.types import Order, Slot


@dataclass(frozen=True)
class Planner:
    """num_steps: optimizer steps of the run; nothing is ordered beyond them."""

    sampler: GroupSampler
    num_steps: int

    def plan(self, step: int, version: int) -> Order:
        slots = tuple(Slot(index) for index in self.sampler.indices(step))
        return Order(step, self.sampler.epoch_of(step), version, slots)
