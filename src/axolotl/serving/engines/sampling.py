"""From logits to the drawn token: pure tensor functions, one row a completion.

The order is vLLM's: biases and forbidden tokens, penalties, temperature (`adjust`), then min-p, top-k, top-p, each on
what the one before it left (`truncate`). The log-prob of a token is that of the distribution it was drawn from, so
after a filter it is normalised over the tokens the filter kept; the mass of those tokens goes with it.
"""

from __future__ import annotations

import numpy as np
import torch

from axolotl.errors import NumericError
from axolotl.serving.engines.history import TokenHistory
from axolotl.serving.engines.options import NEGATIVE_INFINITY, TokenRules
from axolotl.serving.wire import Sampling

#: A trained model has nearly all of its probability in so many tokens. Sorting a whole vocabulary at every step would
#: take as long as the model's forward pass.
LIKELY_TOKENS = 256


class UniformStream:
    """One stream of uniform numbers a row, a function of that row's seed only (Philox counter generator).

    `next(rows)` gives the following number of each named row, float64 in [0, 1).
    """

    def __init__(self, seeds: list[int]) -> None:
        self._generators = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]

    def next(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor([self._generators[row].random() for row in rows], dtype=torch.float64)


def penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide positive and multiply negative logits of seen tokens by `penalty`. logits, seen: `[rows, vocab]`."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k largest logits of each row, ties with the smallest of them included."""
    smallest = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest, NEGATIVE_INFINITY)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose probabilities add up to at least p."""
    probabilities = logits.softmax(dim=-1)
    likely = probabilities.topk(min(LIKELY_TOKENS, logits.shape[-1]), dim=-1)
    kept = _keep_up_to(logits, p, likely.values, likely.indices)
    if likely.values.shape[-1] < logits.shape[-1]:
        reaches_further = likely.values.sum(dim=-1) < p
        if bool(reaches_further.any()):
            everything = probabilities[reaches_further].sort(dim=-1, descending=True)
            kept[reaches_further] = _keep_up_to(logits[reaches_further], p, everything.values, everything.indices)
    return kept


def _keep_up_to(logits: torch.Tensor, p: float, probabilities: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """probabilities, order: `[rows, k]`, the likeliest tokens in descending order; the others are cut."""
    is_cut = probabilities.cumsum(dim=-1) - probabilities >= p
    kept = logits.gather(-1, order).masked_fill(is_cut, NEGATIVE_INFINITY)
    return torch.full_like(logits, NEGATIVE_INFINITY).scatter_(-1, order, kept)


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Keep tokens at least `min_p` times as likely as the most likely one."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), NEGATIVE_INFINITY)


def adjust(
    logits: torch.Tensor,
    sampling: Sampling,
    rules: TokenRules,
    history: TokenHistory,
    *,
    bias: torch.Tensor | None = None,
    forbidden: tuple[int, ...] = (),
) -> torch.Tensor:
    """Logits of the whole distribution, before any filter, float32.

    At temperature 0 the most likely token is taken, and the distribution is that at temperature 1.

    Args:
        logits: `[rows, vocab]`, left as they are.
        history: the tokens of each row so far, with what the penalties of this request need.
        bias: `[vocab]`, see `TokenRules.bias`.
        forbidden: token ids that cannot be drawn at this position.
    """
    logits = logits.float()
    if bias is not None:
        logits = logits + bias
    if forbidden:
        logits = logits.clone()
        logits[:, list(forbidden)] = NEGATIVE_INFINITY
    if sampling.repetition_penalty != 1.0:
        assert history.seen is not None
        logits = penalise_repetition(logits, history.seen, sampling.repetition_penalty)
    if rules.frequency_penalty or rules.presence_penalty:
        assert history.counts is not None
        logits = logits - rules.frequency_penalty * history.counts - rules.presence_penalty * (history.counts > 0)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    return logits


def truncate(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply top_k, top_p and min_p to `[rows, vocab]` logits.

    Returns:
        The logits, minus infinity where they were cut, and `[rows]` the log of the probability that was kept (0 or
        less); None when no filter is on, as at temperature 0, where filters mean nothing.
    """
    if sampling.temperature == 0.0 or not (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        return logits, None
    kept = logits
    if sampling.min_p > 0.0:
        kept = keep_min_p(kept, sampling.min_p)
    if sampling.top_k:
        kept = keep_top_k(kept, sampling.top_k)
    if sampling.top_p < 1.0:
        kept = keep_top_p(kept, sampling.top_p)
    return kept, (kept.logsumexp(dim=-1) - logits.logsumexp(dim=-1)).clamp(max=0.0)


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling: the token in whose share of [0, 1) the row's uniform number falls, and its log-prob.

    Args:
        logits: `[rows, vocab]`, processed; minus infinity means never.
        uniforms: `[rows]` float64 in [0, 1).

    Returns:
        `[rows]` int64 and `[rows]` float64.

    Raises:
        NumericError: a row holds NaN, or nothing but minus infinity.
    """
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    cumulated = shifted.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    if not bool(total.isfinite().all()):
        raise NumericError(
            "the model's output is no longer finite",
            code="E-NUM-03",
            why="its weights are finite but far too large",
            do="lower learning_rate or max_grad_norm, and resume from the newest checkpoint",
        )
    target = torch.minimum(uniforms.to(logits.device)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, target, right=True)
    return tokens[:, 0], (shifted.gather(-1, tokens) - total.log())[:, 0]


def log_probs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`[rows]` log-probs of one token a row under the softmax of `[rows, vocab]` logits."""
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
