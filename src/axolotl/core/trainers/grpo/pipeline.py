"""One optimizer step's way from prompts to micro-batches: sync, produce, score, cut.

    is a push due? ─► WeightSync.push(version)
    DataProducer.produce(step) ─► Scorer.score ─► split into micro-batches

Main thread, every rank. The parts are chosen in `assembly.py`; later stages put replay and re-roll between scoring
and cutting.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator

from axolotl.core.trainers.grpo.distributed import sum_over_ranks
from axolotl.core.trainers.grpo.metrics import completion_metrics, reward_metrics, staleness_metrics
from axolotl.core.trainers.grpo.microbatch import MicroBatch, known_tokens, split
from axolotl.core.trainers.grpo.protocols import DataProducer, WeightSync
from axolotl.core.trainers.grpo.scoring import ScoredBatch, Scorer, loss_mask
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.types import RolloutBatch
from axolotl.core.trainers.grpo.weight_sync.schedule import is_due, version_of
from axolotl.errors import SyncError


@dataclass(frozen=True)
class StepBatch:
    """What `training_step` runs: the micro-batches, the scored rollout they were cut from, and its numbers."""

    micro_batches: list[MicroBatch]
    scored: ScoredBatch
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutPipeline:
    """The parts of a run, joined. Made by `assembly.py`."""

    spec: StepSpec
    producer: DataProducer
    scorer: Scorer
    sync: WeightSync
    accelerator: Accelerator

    def step(self, step: int) -> StepBatch:
        """The micro-batches of optimizer step `step`, counted from 0."""
        started = time.perf_counter()
        is_pushed = is_due(step, self.sync.version, self.spec.sync_interval)
        if is_pushed:
            self.sync.push(version_of(step))
        synced = time.perf_counter()
        batch = self.producer.produce(step)
        _require_pushed(batch, self.sync.version)
        generated = time.perf_counter()
        scored = self.scorer.score(batch)
        done = time.perf_counter()
        seconds = generated - synced
        metrics = {
            **self.describe(scored),
            **staleness_metrics(batch, version_of(step)),
            **(self.sync.metrics if is_pushed else {}),
            "time/sync": synced - started,
            "time/generate": seconds,
            "time/rewards": done - generated,
            "generation/tokens_per_second": float(batch.completion_mask.sum()) / max(seconds, 1e-9),
        }
        return StepBatch(self._cut(scored), scored, metrics)

    def evaluate(self, batch: RolloutBatch) -> StepBatch:
        """The same for held-out prompts, whose rollouts the caller made after `catch_up`."""
        _require_pushed(batch, self.sync.version)
        scored = self.scorer.score(batch)
        return StepBatch(self._cut(scored), scored, self.describe(scored))

    def describe(self, scored: ScoredBatch) -> dict[str, float]:
        names = self.scorer.rewards.names
        return {**completion_metrics(scored.batch), **reward_metrics(names, scored.result.values, scored.advantages)}

    def catch_up(self, step: int) -> None:
        """Bring the generator to the weights before optimizer step `step`, whatever the interval."""
        if self.sync.version != version_of(step):
            self.sync.push(version_of(step))

    def _cut(self, scored: ScoredBatch) -> list[MicroBatch]:
        mask = loss_mask(scored.batch, mask_truncated=self.spec.mask_truncated)
        tokens = float(known_tokens(mask, scored.batch.sampling_logps).sum())
        return split(
            scored,
            micro_batch_size=self.spec.micro_batch_size,
            loss_type=self.spec.loss_type,
            mask_truncated=self.spec.mask_truncated,
            device=torch.device(self.accelerator.device),
            all_ranks_tokens=sum_over_ranks(self.accelerator, tokens),
        )

    def close(self) -> None:
        self.producer.close()
        self.scorer.rewards.close()
        self.sync.close()


def _require_pushed(batch: RolloutBatch, newest: int) -> None:
    """Raise `E-SYN-12` for a completion of a version that no push has confirmed, the base model's included."""
    strange = {version for version in batch.adapter_versions if not 1 <= version <= newest}
    if strange:
        raise SyncError(
            f"completions of policy version {min(strange)} were not asked for; versions 1 to {newest} were pushed",
            code="E-SYN-12",
            why="training on another policy's completions would go wrong without a sign",
            do="please report",
        )
