"""Which prompts an optimizer step trains on: whole groups, one shard a rank, the same after a resume.

The order is a function of (seed, epoch) and the position a function of the optimizer step, so there is no state to
save: a resumed run asks for the rollout of step k and gets what the first run would have got.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axolotl.core.trainers.grpo.span import ONE_STEP, Span
from axolotl.errors import DataError


@dataclass(frozen=True)
class GroupSampler:
    """Prompt indices for every rollout.

    num_prompts: rows of the data set. prompts_per_step: prompts of one step on one rank. num_ranks, rank: the shard.
    span: the steps of a rollout. The prompts that do not fill a last rollout are left out of that epoch; shuffling
    gives them their turn in the next.
    """

    num_prompts: int
    prompts_per_step: int
    seed: int = 0
    shuffle: bool = True
    num_ranks: int = 1
    rank: int = 0
    span: Span = ONE_STEP

    def __post_init__(self) -> None:
        needed = self.prompts_per_rollout * self.num_ranks
        if self.num_prompts < needed:
            are = "prompt is" if self.num_prompts == 1 else "prompts are"
            raise DataError(
                f"{self.num_prompts} {are} too few: {self._unit} takes {needed}",
                code="E-DAT-06",
                why=f"{self.prompts_per_rollout} prompts a rank x {self.num_ranks} rank(s); none of them twice",
                do=self._remedy,
            )

    @property
    def prompts_per_rollout(self) -> int:
        """On one rank."""
        return self.prompts_per_step * self.span.num_slices

    @property
    def rollouts_per_epoch(self) -> int:
        return self.num_prompts // (self.prompts_per_rollout * self.num_ranks)

    @property
    def steps_per_epoch(self) -> int:
        return self.rollouts_per_epoch * self.span.length

    @property
    def left_out(self) -> int:
        """Prompts that an epoch does not reach."""
        return self.num_prompts - self.rollouts_per_epoch * self.prompts_per_rollout * self.num_ranks

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def indices(self, step: int) -> list[int]:
        """Row numbers of this rank's prompts of the rollout that optimizer step `step` trains on, slice after slice.
        Steps are counted from 0 over the whole run.

        A slice is the same prompts over all ranks, however many they are.
        """
        epoch, position = divmod(step // self.span.length, self.rollouts_per_epoch)
        order, size = self._order(epoch), self.prompts_per_step
        first = position * self.span.num_slices
        starts = [((first + slice_) * self.num_ranks + self.rank) * size for slice_ in range(self.span.num_slices)]
        return [index for start in starts for index in order[start : start + size]]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_prompts))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return [int(i) for i in torch.randperm(self.num_prompts, generator=generator)]

    @property
    def _unit(self) -> str:
        slices = self.span.num_slices
        return "one optimizer step" if slices == 1 else f"one rollout of {slices} optimizer steps"

    @property
    def _remedy(self) -> str:
        step = "micro_batch_size x gradient_accumulation_steps / trl.num_generations"
        return f"add rows, or lower {step if self.span.num_slices == 1 else 'trl.generation_batch_size'}"
