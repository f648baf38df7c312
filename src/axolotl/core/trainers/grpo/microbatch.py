"""A scored rollout cut into micro-batches, in the form TRL's loss reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axolotl.core.trainers.grpo.algo.shares import TOKEN_TOTAL_LOSSES, loss_share
from axolotl.core.trainers.grpo.scoring import TrainedBatch, loss_mask
from axolotl.core.trainers.grpo.types import RolloutBatch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """inputs: the tensors of TRL's loss for these rows, padding trimmed. share: their weight in the step's loss. rows:
    numbers in the batch that was cut, of the first rows; those behind them have no weight. prompts: of each, its
    prompt's row in the data set. is_for_later: a later step trains them, and needs the log-probs of now."""

    inputs: Tensors
    share: float
    rows: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    is_for_later: bool = False


@dataclass(frozen=True)
class StepTotals:
    """What the losses of one optimizer step are divided by.

    rows: completions of the step on this rank. tokens: those that count in the loss, a rank's average. all_tokens:
    their sum over the ranks; an average over the steps where a rollout has several, as TRL has it.
    """

    rows: int
    tokens: float
    all_tokens: float

    def divisor(self, loss_type: str) -> float:
        """The number of tokens by which a loss of `TOKEN_LOSSES` is divided, up to a constant."""
        return self.all_tokens if loss_type in TOKEN_TOTAL_LOSSES else self.tokens


def split(
    trained: TrainedBatch,
    totals: StepTotals,
    *,
    micro_batch_size: int,
    loss_type: str,
    mask_truncated: bool,
    device: torch.device,
    rows: Sequence[int] | None = None,
    num_rows: int = 0,
) -> list[MicroBatch]:
    """Micro-batches in group order: a group stays in consecutive ones, it is never torn apart by a shuffle.

    Args:
        rows: the completions that take part; all of them when None. Those left out still count in `totals`.
        num_rows: of all micro-batches together, when `rows` are fewer: another rank has that many. The last ones are
            then filled up with completions that have no weight, since all ranks run the same forwards.
    """
    batch = trained.batch
    mask = loss_mask(batch, mask_truncated=mask_truncated)
    own = list(range(batch.num_completions)) if rows is None else list(rows)
    kept = own + [shortest_row(trained)] * (num_rows - len(own))
    micro_batches = []
    for start in range(0, len(kept), micro_batch_size):
        chosen = torch.tensor(kept[start : start + micro_batch_size])
        has_weight = torch.arange(start, start + len(chosen)) < len(own)
        inputs = _trim(
            {
                "prompt_ids": batch.prompt_ids[chosen],
                "prompt_mask": batch.prompt_mask[chosen],
                "completion_ids": batch.completion_ids[chosen],
                "completion_mask": mask[chosen] * has_weight.unsqueeze(1),
            },
            lengths=batch.completion_mask[chosen],
        )
        width = inputs["completion_ids"].shape[1]
        inputs["advantages"] = trained.advantages.values[chosen] * has_weight
        inputs["num_items_in_batch"] = torch.tensor(totals.all_tokens)
        counted = inputs["completion_mask"]
        if batch.sampling_logps is not None:
            logps = batch.sampling_logps[chosen, :width]
            inputs["sampling_per_token_logps"] = logps
            # TRL multiplies this mask into the loss but not into attention: the way to drop a token, not a position.
            inputs["tool_mask"] = logps.isfinite().long()
            counted = known_tokens(counted, logps)
        if trained.stored_logps is not None:
            inputs["stored_logps"] = trained.stored_logps[chosen, :width]
        share = loss_share(loss_type, counted, totals.rows, totals.tokens)
        cut = tuple(chosen[has_weight].tolist())
        prompts = tuple(batch.groups[row // batch.group_size].row.index for row in cut)
        micro_batches.append(
            MicroBatch({name: value.to(device) for name, value in inputs.items()}, share, cut, prompts)
        )
    return micro_batches


def num_counted(batch: RolloutBatch, *, mask_truncated: bool) -> float:
    """Tokens of the batch that count in the loss."""
    return float(known_tokens(loss_mask(batch, mask_truncated=mask_truncated), batch.sampling_logps).sum())


def known_tokens(mask: torch.Tensor, sampling_logps: torch.Tensor | None) -> torch.Tensor:
    """`[N, C]` the mask without tokens whose sampling log-prob is unknown."""
    return mask if sampling_logps is None else mask * sampling_logps.isfinite().long()


def rows_with_signal(trained: TrainedBatch) -> list[int]:
    """Completions of groups whose advantages are not all zero: only they have a gradient."""
    size = trained.batch.group_size
    has_signal = (trained.advantages.values.view(-1, size) != 0).any(dim=1)
    return [row for row in range(trained.batch.num_completions) if has_signal[row // size]]


def shortest_row(trained: TrainedBatch) -> int:
    """The completion that is cheapest to run."""
    lengths = trained.batch.prompt_mask.sum(dim=1) + trained.batch.completion_mask.sum(dim=1)
    return int(lengths.argmin())


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
