"""Which optimizer steps train on which rollout: arithmetic on step numbers, and nothing else.

A rollout is what is generated together, by one policy. Its slices are trained one a step, and then all over again as
often as `num_iterations` says, in TRL's order: with 2 slices and 3 iterations, steps 0 .. 5 train slices 0 1 0 1 0 1
and step 6 begins the next rollout.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """num_slices: optimizer steps that one pass over a rollout takes. num_iterations: passes."""

    num_slices: int = 1
    num_iterations: int = 1

    @property
    def length(self) -> int:
        """Optimizer steps of one rollout."""
        return self.num_slices * self.num_iterations

    def first(self, step: int) -> int:
        """The step that begins the rollout which `step` trains on."""
        return step - step % self.length

    def begins(self, step: int) -> bool:
        return step % self.length == 0

    def slice_of(self, step: int) -> int:
        return step % self.num_slices

    def ends_slice(self, step: int) -> bool:
        """Whether `step` is the last to train on its slice."""
        return step % self.length >= self.length - self.num_slices


ONE_STEP = Span()
