"""Prompts to rollouts, in step with training: generate when asked, on the thread that asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axolotl.core.trainers.grpo.protocols import GenerationBackend
from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.rollout.seeds import completion_seed
from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.types import PromptRow, RolloutBatch
from axolotl.serving.wire import Sampling


@dataclass(frozen=True)
class SyncProducer:
    """The synchronous `DataProducer`: nothing is generated before it is wanted, so nothing is ever stale."""

    rows: Sequence[PromptRow]
    sampler: GroupSampler
    backend: GenerationBackend
    sampling: Sampling
    run_seed: int
    pad_token_id: int
    eos_token_id: int

    def produce(self, step: int) -> RolloutBatch:
        rows = [self.rows[index] for index in self.sampler.indices(step)]
        return self.roll_out(rows, epoch=self.sampler.epoch_of(step))

    def roll_out(self, rows: Sequence[PromptRow], *, epoch: int) -> RolloutBatch:
        """Completions of the rows given; evaluation calls it with rows of its own and epoch -1."""
        seeds = [[completion_seed(self.run_seed, epoch, row.index, i) for i in range(self.sampling.n)] for row in rows]
        groups = self.backend.generate(rows, seeds, self.sampling)
        return collate(groups, pad_token_id=self.pad_token_id, eos_token_id=self.eos_token_id)

    def close(self) -> None:
        self.backend.close()
