"""The seams of the trainer: what it asks of generation, rewards and weight sync, and from which thread and rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow, RewardRequest, RewardResult, RolloutBatch
from axolotl.serving.wire import Sampling


class GenerationBackend(Protocol):
    """Makes completions. Called on every rank with that rank's own prompts."""

    @property
    def is_thread_safe(self) -> bool:
        """Whether `generate` may run off the main thread: true only when it touches neither model nor collectives."""
        ...

    def generate(
        self, rows: Sequence[PromptRow], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[CompletionGroup]:
        """`sampling.n` completions of each row, in order; `seeds` is `[len(rows)][n]`."""
        ...

    def close(self) -> None: ...


class DataProducer(Protocol):
    """Hands the trainer the rollouts of one optimizer step. Main thread, every rank."""

    def produce(self, step: int) -> RolloutBatch:
        """The rollouts that optimizer step `step` (counted from 0) trains on."""
        ...

    def close(self) -> None: ...


class RewardRunner(Protocol):
    """Runs the user's reward functions. Main thread, every rank, that rank's completions."""

    @property
    def names(self) -> tuple[str, ...]:
        """One readable, distinct metric name a function."""
        ...

    def score(self, request: RewardRequest) -> RewardResult:
        """Scores of all completions; raises `RewardError` when a function misbehaves."""
        ...

    def close(self) -> None: ...


class WeightSync(Protocol):
    """Brings the policy to whoever generates. Main thread; all ranks call it, and it raises on all or on none."""

    @property
    def version(self) -> int:
        """The version that the generator is known to serve; 0 is the base model."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers of the last push, under the names they are logged with."""
        ...

    def push(self, version: int) -> None:
        """Returns when the generator serves `version` of the current weights."""
        ...

    def close(self) -> None: ...
