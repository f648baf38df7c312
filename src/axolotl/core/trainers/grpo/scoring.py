"""Rollouts to advantages: decode, call the user's rewards, compare within groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from axolotl.core.trainers.grpo.algo.advantages import Advantages, AdvantageSpec, compute_advantages, join_advantages
from axolotl.core.trainers.grpo.distributed import World
from axolotl.core.trainers.grpo.protocols import RewardRunner
from axolotl.core.trainers.grpo.types import (
    CompletionGroup,
    Prompt,
    PromptRow,
    RewardRequest,
    RewardResult,
    RolloutBatch,
)

Collate = Callable[[Sequence[CompletionGroup]], RolloutBatch]


@dataclass(frozen=True)
class RewardedBatch:
    """A rollout with its rewards (`result.values`, `[N, F]`); texts are what the rewards saw."""

    batch: RolloutBatch
    prompts: list[Prompt]
    completions: list[Prompt]
    result: RewardResult


@dataclass(frozen=True)
class ScoredBatch(RewardedBatch):
    advantages: Advantages


@dataclass(frozen=True)
class TrainedBatch:
    """Groups as they are trained.

    stored_logps: `[N, C]` of a policy of the past: the one that a replayed group was first trained with, or that of a
    rollout's first step. NaN where the present one counts; None where it does everywhere.
    """

    batch: RolloutBatch
    advantages: Advantages
    stored_logps: torch.Tensor | None = None


@dataclass(frozen=True)
class Scorer:
    """trainer_state: returns transformers' `TrainerState`, which reward functions may read."""

    rewards: RewardRunner
    tokenizer: PreTrainedTokenizerBase
    spec: AdvantageSpec
    trainer_state: Callable[[], Any]
    world: World = field(default_factory=World)

    def score(self, batch: RolloutBatch) -> RewardedBatch:
        prompts, completions, ids = self._texts(batch)
        request = RewardRequest(
            prompts=prompts,
            completions=completions,
            completion_ids=ids,
            columns=_repeat_columns([row for row in batch.rows for _ in range(batch.group_size)]),
            trainer_state=self.trainer_state(),
        )
        result = self.rewards.score(request)
        return RewardedBatch(batch, prompts, completions, result)

    def compare(self, rewarded: RewardedBatch) -> ScoredBatch:
        """Collective, where advantages compare the completions of all ranks."""
        values = rewarded.result.values
        if self.spec.needs_all and self.world.size > 1:
            ranks = self.world.gather(values)
            groups = len(rewarded.batch.groups)
            own = range(self.world.rank * groups, (self.world.rank + 1) * groups)
            advantages = compute_advantages(torch.cat(ranks), self.spec).of_groups(own, rewarded.batch.group_size)
        else:
            advantages = compute_advantages(values, self.spec)
        return ScoredBatch(rewarded.batch, rewarded.prompts, rewarded.completions, rewarded.result, advantages)

    def restored(self, batch: RolloutBatch, values: torch.Tensor, advantages: Advantages) -> ScoredBatch:
        """A batch that was scored before a checkpoint. values: `[N, F]` rewards."""
        prompts, completions, _ = self._texts(batch)
        return ScoredBatch(batch, prompts, completions, RewardResult(values, {}, {}), advantages)

    def _texts(self, batch: RolloutBatch) -> tuple[list[Prompt], list[Prompt], list[list[int]]]:
        """Prompts, completions and the tokens of these, one a row."""
        ids = [row[mask.bool()].tolist() for row, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        rows = [row for row in batch.rows for _ in range(batch.group_size)]
        completions = [_as_completion(row, text) for row, text in zip(rows, texts, strict=True)]
        return [row.prompt for row in rows], completions, ids


def join(parts: Sequence[ScoredBatch], collate: Collate) -> ScoredBatch:
    """Parts of one step as if they had been scored together. Their advantages stay as they are."""
    if len(parts) == 1:
        return parts[0]
    return ScoredBatch(
        batch=collate([group for part in parts for group in part.batch.groups]),
        prompts=[prompt for part in parts for prompt in part.prompts],
        completions=[completion for part in parts for completion in part.completions],
        result=_join_results([part.result for part in parts]),
        advantages=join_advantages([part.advantages for part in parts]),
    )


def select(scored: ScoredBatch, indices: Sequence[int], collate: Collate) -> ScoredBatch:
    """Some groups of a batch, with the rewards and advantages that they had in all of it. What reward functions logged
    belongs to the call, and stays with it."""
    size = scored.batch.group_size
    rows = [row for i in indices for row in range(i * size, (i + 1) * size)]
    return ScoredBatch(
        batch=collate([scored.batch.groups[i] for i in indices]),
        prompts=[scored.prompts[row] for row in rows],
        completions=[scored.completions[row] for row in rows],
        result=RewardResult(scored.result.values[rows], {}, {}),
        advantages=scored.advantages.of_groups(indices, size),
    )


def _join_results(results: Sequence[RewardResult]) -> RewardResult:
    """A column that a part did not log is None there."""
    columns = {name for result in results for name in result.extra}
    metrics: dict[str, list[float]] = {}
    for result in results:
        for name, values in result.metrics.items():
            metrics.setdefault(name, []).extend(values)
    return RewardResult(
        values=torch.cat([result.values for result in results]),
        extra={
            name: [value for r in results for value in r.extra.get(name, [None] * r.values.shape[0])]
            for name in sorted(columns)
        },
        metrics=metrics,
    )


def _as_completion(row: PromptRow, text: str) -> Prompt:
    """Messages for a prompt of messages, else text: what TRL hands to reward functions."""
    if isinstance(row.prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


def _repeat_columns(rows: Sequence[PromptRow]) -> dict[str, list[Any]]:
    return {name: [row.columns[name] for row in rows] for name in rows[0].columns}


def loss_mask(batch: RolloutBatch, *, mask_truncated: bool) -> torch.Tensor:
    """`[N, C]` 1 on tokens that count in the loss: all of a completion, or none when it was cut off and
    `mask_truncated_completions` is on."""
    if not mask_truncated:
        return batch.completion_mask
    return batch.completion_mask * (~batch.is_truncated).long().unsqueeze(1)
