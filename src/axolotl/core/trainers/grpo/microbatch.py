"""A scored rollout cut into the micro-batches of one optimizer step, in the form TRL's loss reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axolotl.core.trainers.grpo.algo.shares import loss_share
from axolotl.core.trainers.grpo.scoring import ScoredBatch, loss_mask

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """inputs: the tensors of TRL's loss for these rows, padding trimmed. share: their weight in the step's loss."""

    inputs: Tensors
    share: float


def split(
    scored: ScoredBatch,
    *,
    micro_batch_size: int,
    loss_type: str,
    mask_truncated: bool,
    device: torch.device,
    all_ranks_tokens: float | None = None,
) -> list[MicroBatch]:
    """Micro-batches in group order: a group stays in consecutive ones, it is never torn apart by a shuffle.

    Args:
        all_ranks_tokens: tokens of the step that count, summed over ranks; this rank's own when None.
    """
    batch = scored.batch
    mask = loss_mask(batch, mask_truncated=mask_truncated)
    tokens = float(known_tokens(mask, batch.sampling_logps).sum())
    total = tokens if all_ranks_tokens is None else all_ranks_tokens
    micro_batches = []
    for start in range(0, batch.num_completions, micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        inputs = _trim(
            {
                "prompt_ids": batch.prompt_ids[rows],
                "prompt_mask": batch.prompt_mask[rows],
                "completion_ids": batch.completion_ids[rows],
                "completion_mask": mask[rows],
            },
            lengths=batch.completion_mask[rows],
        )
        width = inputs["completion_ids"].shape[1]
        inputs["advantages"] = scored.advantages.values[rows]
        inputs["num_items_in_batch"] = torch.tensor(total)
        counted = inputs["completion_mask"]
        if batch.sampling_logps is not None:
            logps = batch.sampling_logps[rows, :width]
            inputs["sampling_per_token_logps"] = logps
            # TRL multiplies this mask into the loss but not into attention: the way to drop a token, not a position.
            inputs["tool_mask"] = logps.isfinite().long()
            counted = known_tokens(counted, logps)
        share = loss_share(loss_type, counted, batch.num_completions, tokens)
        micro_batches.append(MicroBatch({name: value.to(device) for name, value in inputs.items()}, share))
    return micro_batches


def known_tokens(mask: torch.Tensor, sampling_logps: torch.Tensor | None) -> torch.Tensor:
    """`[N, C]` the mask without tokens whose sampling log-prob is unknown."""
    return mask if sampling_logps is None else mask * sampling_logps.isfinite().long()


def _trim(inputs: Tensors, lengths: torch.Tensor) -> Tensors:
    """Cut the columns that are padding in every row: on the left of prompts, on the right of completions."""
    first = int(inputs["prompt_mask"].any(dim=0).long().argmax())
    width = int(lengths.sum(dim=1).max())
    return {
        "prompt_ids": inputs["prompt_ids"][:, first:],
        "prompt_mask": inputs["prompt_mask"][:, first:],
        "completion_ids": inputs["completion_ids"][:, :width],
        "completion_mask": inputs["completion_mask"][:, :width],
    }
