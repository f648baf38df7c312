"""The seams of the trainer: what it asks of generation, rewards and weight sync, and from which thread and rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from axolotl.core.trainers.grpo.types import CompletionGroup, Order, PromptRow, RewardRequest, RewardResult
from axolotl.serving.wire import Sampling


class GenerationBackend(Protocol):
    """Makes completions. Called on every rank with that rank's own prompts."""

    @property
    def is_thread_safe(self) -> bool:
        """Whether `generate` may run off the main thread: true only when it touches neither model nor collectives."""
        ...

    def generate(
        self, rows: Sequence[PromptRow], seeds: Sequence[Sequence[int]], sampling: Sampling, version: int
    ) -> Iterator[tuple[int, CompletionGroup]]:
        """`sampling.n` completions of each row by policy `version`, as they finish, each with the position of its row.

        Args:
            seeds: `[len(rows)][n]`.
        """
        ...

    def close(self) -> None: ...


class DataProducer(Protocol):
    """Makes the groups that are ordered, in the order of the orders. Called on the main thread of every rank."""

    @property
    def depth(self) -> int:
        """How many rollouts ahead orders are placed, so that they are made while others train."""
        ...

    @property
    def placed(self) -> Sequence[Order]:
        """Orders whose groups have not been asked for, the oldest first."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """How it is doing now, under the names that are logged."""
        ...

    def place(self, order: Order) -> None:
        """Take an order. Returns at once."""
        ...

    def groups(self) -> Iterator[tuple[int, CompletionGroup]]:
        """The groups of the oldest order as they finish, each with its place in the order. Raises what making them
        raised."""
        ...

    def adopt(self, order: Order, groups: Sequence[tuple[int, CompletionGroup]]) -> None:
        """Take an order that is made already: a checkpoint kept it."""
        ...

    def finished(self) -> list[tuple[Order, list[tuple[int, CompletionGroup]]]]:
        """Orders that are made and wait, with their groups, the oldest first."""
        ...

    def drain(self) -> None:
        """Return when all orders are made."""
        ...

    def close(self) -> None:
        """Give up what is being made. Returns within seconds."""
        ...


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
    def keeps_versions(self) -> bool:
        """Whether versions before the newest can still be generated with after a push."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers of the last push, under the names they are logged with."""
        ...

    def begin(self, version: int) -> None:
        """Returns when `version` of the current weights can be generated with. `settle` has to follow before anything
        that was generated is trained on."""
        ...

    def settle(self) -> None:
        """Returns when it is known that the version that was begun is what is generated with."""
        ...

    def push(self, version: int) -> None:
        """Returns when the generator serves `version` of the current weights."""
        ...

    def close(self) -> None: ...
