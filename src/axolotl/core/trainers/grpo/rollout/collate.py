"""Lists of tokens to padded tensors: prompts on the left, completions on the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, RolloutBatch


def collate(groups: Sequence[CompletionGroup], *, pad_token_id: int, eos_token_id: int) -> RolloutBatch:
    """One batch of whole groups.

    A completion without a token gets the end token with an unknown log-prob: shapes stay positive, the loss skips it.
    """
    completions = [_not_empty(completion, eos_token_id) for group in groups for completion in group.completions]
    group_size = len(groups[0].completions)
    assert all(len(group.completions) == group_size for group in groups)
    prompts = [group.row.ids for group in groups for _ in range(group_size)]
    has_logps = all(completion.logprobs is not None for completion in completions)
    prompt_ids, prompt_mask = _pad(prompts, pad_token_id, left=True)
    completion_ids, completion_mask = _pad([c.ids for c in completions], pad_token_id, left=False)
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        sampling_logps=_pad_logps([c.logprobs or () for c in completions]) if has_logps else None,
        is_truncated=torch.tensor([c.is_truncated for c in completions]),
        rows=tuple(group.row for group in groups),
        group_size=group_size,
        adapter_versions=tuple(c.adapter_version for c in completions),
        instance_ids=tuple(c.instance_id for c in completions),
        groups=tuple(groups),
        is_renormalised=any(c.is_renormalised for c in completions),
    )


def _not_empty(completion: Completion, eos_token_id: int) -> Completion:
    if completion.ids:
        return completion
    logprobs = None if completion.logprobs is None else (math.nan,)
    return replace(completion, ids=(eos_token_id,), logprobs=logprobs)


def _pad(sequences: Sequence[Sequence[int]], value: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, longest]` ids and their mask, both int64."""
    side = "left" if left else "right"
    rows = [torch.tensor(ids, dtype=torch.long) for ids in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_value=0, padding_side=side)
    return ids, mask


def _pad_logps(sequences: Sequence[Sequence[float]]) -> torch.Tensor:
    rows = [torch.tensor(values, dtype=torch.float32) for values in sequences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0.0)
