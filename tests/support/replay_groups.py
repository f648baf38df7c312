"""Groups in a few words, for tests of what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence

from axolotl.core.trainers.grpo.rollout.replay import ReplayGroup
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow


def make_row(index: int, ids: Sequence[int] | None = None) -> PromptRow:
    """A row with as many tokens as its number says, and one more."""
    return PromptRow(index, f"prompt {index}", tuple(ids) if ids is not None else (7,) * (index + 1), {"answer": index})


def make_group(row: int, lengths: Sequence[int] = (1, 2), *, version: int = 1, reroll: int = 0) -> CompletionGroup:
    """Completions of these lengths: tokens 10, 11, ..; log-probs -0.1, -0.2, .."""
    completions = tuple(
        Completion(
            ids=tuple(range(10, 10 + length)),
            logprobs=tuple(-0.1 * (i + 1) for i in range(length)),
            is_truncated=False,
            adapter_version=version,
            instance_id="a",
        )
        for length in lengths
    )
    return CompletionGroup(make_row(row), completions, reroll)


def make_kept(
    row: int, step: int = 0, signal: float = 1.0, *, lengths: Sequence[int] = (1, 2), version: int = 1
) -> ReplayGroup:
    """A scored group of one reward function; its rewards are 0 and `signal`, then 0 again."""
    rewards = tuple((signal if place == 1 else 0.0,) for place in range(len(lengths)))
    return ReplayGroup(make_group(row, lengths, version=version), rewards, step, signal)
