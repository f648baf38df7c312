"""From logits to the drawn token: pure tensor functions, one row a completion.

The order is that of transformers' own processors: repetition penalty, minimum length, temperature, top-k, top-p,
min-p. The log-prob of a token is that of the distribution it was drawn from, so after a filter it is normalised over
the tokens the filter kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from axolotl.errors import NumericError
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import Sampling

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class StopRule:
    """When a completion ends. `forbidden_early`: tokens that cannot be drawn before `min_tokens` others were."""

    stop_ids: frozenset[int]
    min_tokens: int
    forbidden_early: tuple[int, ...]


def stop_rule(sampling: Sampling, eos_token_ids: frozenset[int]) -> StopRule:
    """The stop rule of a request.

    `sampling.extra` may hold `stop_token_ids` (list of ints), `ignore_eos` (bool) and `min_tokens` (int). Everything
    else, and `structured_regex`, raises `EngineRejects` with the name of the option.
    """
    if sampling.structured_regex is not None:
        raise EngineRejects("vllm_guided_decoding_regex: the transformers engine cannot constrain the output")
    extra = dict(sampling.extra)
    stop_token_ids = _ints("stop_token_ids", extra.pop("stop_token_ids", None) or [])
    ignore_eos = extra.pop("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise EngineRejects(f"generation_kwargs.ignore_eos must be true or false, not {ignore_eos!r}")
    (min_tokens,) = _ints("min_tokens", [extra.pop("min_tokens", 0)])
    if extra:
        names = ", ".join(sorted(extra))
        raise EngineRejects(
            f"generation_kwargs: the transformers engine does not support {names}; "
            "it supports stop_token_ids, ignore_eos and min_tokens"
        )
    if not 0 <= min_tokens <= sampling.max_tokens:
        raise EngineRejects(f"generation_kwargs.min_tokens {min_tokens} is not between 0 and {sampling.max_tokens}")
    stop_ids = frozenset(stop_token_ids) | (frozenset() if ignore_eos else eos_token_ids)
    return StopRule(stop_ids, min_tokens, tuple(sorted(stop_ids | eos_token_ids)) if min_tokens else ())


def _ints(name: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise EngineRejects(f"generation_kwargs.{name} needs whole numbers, not {values!r}")
    return values


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
    ordered, order = logits.sort(dim=-1)
    is_cut = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    is_cut[:, -1] = False
    return logits.masked_fill(is_cut.scatter(-1, order, is_cut), NEGATIVE_INFINITY)


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Keep tokens at least `min_p` times as likely as the most likely one."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), NEGATIVE_INFINITY)


def process(
    logits: torch.Tensor, sampling: Sampling, *, seen: torch.Tensor | None, forbidden: tuple[int, ...]
) -> torch.Tensor:
    """Logits of the distribution that tokens are drawn from, float32.

    At temperature 0 the most likely token is taken, filters mean nothing, and the distribution is that at
    temperature 1.

    Args:
        logits: `[rows, vocab]`.
        seen: `[rows, vocab]`, true for the tokens of prompt and completion so far; needed for a repetition penalty.
        forbidden: token ids that cannot be drawn at this position.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1.0:
        assert seen is not None
        logits = penalise_repetition(logits, seen, sampling.repetition_penalty)
    if forbidden:
        logits = logits.clone()
        logits[:, list(forbidden)] = NEGATIVE_INFINITY
    if sampling.temperature == 0.0:
        return logits
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1.0:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0.0:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


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
