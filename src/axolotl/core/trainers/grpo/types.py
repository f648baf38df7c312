"""The data that flows through one step, as frozen dataclasses.

Shape letters: N completions, G group size, P longest prompt, C longest completion, F reward functions. Groups are
always whole and in group order: rows `k*G .. (k+1)*G - 1` belong to prompt k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Messages = list[dict[str, Any]]
Prompt = str | Messages


@dataclass(frozen=True)
class PromptRow:
    """One prompt of the data set as the trainer sees it.

    index: its row number in the prepared data set. ids: its tokens under the chat template. columns: every column
    that the transform kept, `prompt` excluded; reward functions get them.
    """

    index: int
    prompt: Prompt
    ids: tuple[int, ...]
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """One sampled completion, on the CPU, as plain numbers.

    ids: `[c]`, c >= 1. logprobs: `[c]` under the sampling policy before top_p, top_k and min_p cut it (temperature and
    penalties applied), NaN where unknown, or None when the backend has none. is_renormalised: they are those of the cut
    distribution instead, since what it kept is unknown. adapter_version and instance_id name the policy that made it;
    version 0 is the base model.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    is_truncated: bool
    adapter_version: int
    instance_id: str
    is_renormalised: bool = False


@dataclass(frozen=True)
class CompletionGroup:
    """A prompt and all of its completions. reroll: how often the prompt had been drawn before, in the same epoch."""

    row: PromptRow
    completions: tuple[Completion, ...]
    reroll: int = 0


@dataclass(frozen=True)
class Slot:
    """One group that is to be made: row of the data set, and how often that prompt has been drawn before."""

    row: int
    reroll: int = 0


@dataclass(frozen=True)
class Order:
    """The groups of one rollout, to be made by one policy version: decided before anybody makes them.

    step: the optimizer step that it begins with. slots: slice after slice, where several steps share a rollout.
    """

    step: int
    epoch: int
    version: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class RewardRequest:
    """What reward functions are called with: lists of length N, columns repeated for every completion.

    prompts and completions are messages when the data set's prompts are, otherwise text.
    """

    prompts: list[Prompt]
    completions: list[Prompt]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    trainer_state: Any


@dataclass(frozen=True)
class RewardResult:
    """values: `[N, F]` float32, NaN where a function abstained. extra: columns for the completions table, `metrics`:
    scalars, both as the functions logged them through `log_extra` and `log_metric`."""

    values: torch.Tensor
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]


@dataclass(frozen=True)
class RolloutBatch:
    """Whole groups, padded: prompts on the left, completions on the right.

    prompt_ids, prompt_mask: `[N, P]` int64. completion_ids, completion_mask: `[N, C]` int64.
    sampling_logps: `[N, C]` float32, NaN where unknown, 0 on padding; None when the backend has none.
    is_truncated: `[N]` bool. adapter_versions: N ints. instance_ids: N strings. groups: what it was made from.
    is_renormalised: see `Completion`; whether it is true of any.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    sampling_logps: torch.Tensor | None
    is_truncated: torch.Tensor
    rows: tuple[PromptRow, ...]
    group_size: int
    adapter_versions: tuple[int, ...]
    instance_ids: tuple[str, ...]
    groups: tuple[CompletionGroup, ...]
    is_renormalised: bool = False

    def __post_init__(self) -> None:
        n = self.completion_ids.shape[0]
        assert n == len(self.rows) * self.group_size, (n, len(self.rows), self.group_size)
        assert self.prompt_ids.shape == self.prompt_mask.shape and self.prompt_ids.shape[0] == n
        assert self.completion_ids.shape == self.completion_mask.shape
        assert self.sampling_logps is None or self.sampling_logps.shape == self.completion_ids.shape
        assert self.is_truncated.shape == (n,)
        assert len(self.adapter_versions) == n == len(self.instance_ids)

    @property
    def num_completions(self) -> int:
        return int(self.completion_ids.shape[0])
