"""How much of an optimizer step's loss one micro-batch carries.

The trainer cuts the completions of a step into micro-batches and sums their gradients. The sum equals the gradient of
the whole step when each micro-batch's mean is weighted with its share: of the rows for losses that average over
completions, of the tokens for those that average over all tokens. `dapo`, `cispo` and `vespo` divide by the step's
token count themselves, so that their normaliser must not shrink with the micro-batch: TRL is given the micro-batch's
part of that count. It takes a count below 1 for 1, which a share of the rows can make of a step with few tokens, and
a share of the tokens never.
"""

from __future__ import annotations

import torch

TOKEN_TOTAL_LOSSES = frozenset({"dapo", "cispo", "vespo"})

# Losses that are divided by a number of tokens of the whole step, by TRL or by `loss_share`.
TOKEN_LOSSES = TOKEN_TOTAL_LOSSES | {"bnpo"}


def loss_share(loss_type: str, micro_mask: torch.Tensor, step_rows: int, step_tokens: float) -> float:
    """The weight of a micro-batch, in (0, 1]; the shares of a step add up to 1.

    Args:
        micro_mask: `[n, c]` 1 on the tokens of this micro-batch that count in the loss.
        step_rows: completions of the whole step on this rank.
        step_tokens: tokens of the whole step on this rank that count in the loss.
    """
    if loss_type in TOKEN_LOSSES and step_tokens > 0:
        # A micro-batch without tokens has no loss; any positive share keeps its quotient 0 instead of 0/0.
        return max(float(micro_mask.sum()), 1e-9) / step_tokens
    return micro_mask.shape[0] / step_rows
