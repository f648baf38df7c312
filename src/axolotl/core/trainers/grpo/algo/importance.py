"""Importance weights for completions that another policy sampled: the server's numerics, or older weights.

The weight of a token is pi_trainer(token) / pi_sampler(token), both after temperature, truncated (TIS) or masked (MIS)
so that single tokens cannot dominate; see https://fengyao.notion.site/off-policy-rl. In the sequence modes the ratio of
a completion is the product over its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class ImportanceSpec:
    """cap and floor bound the ratio. The truncate modes clamp to them; the mask modes give weight 0 outside."""

    mode: ImportanceMode
    cap: float | None = 3.0
    floor: float | None = None

    @property
    def is_sequence(self) -> bool:
        return self.mode.startswith("sequence")


@dataclass(frozen=True)
class Importance:
    """One value a token, `[N, C]`, or, in the sequence modes, one a completion, `[N, 1]`; all detached.

    weights: what multiplies the loss; 1 where nothing counts. log_ratios: before cap and floor, 0 where nothing counts.
    is_changed: cap or floor made the weight another than the ratio. is_rejected: a mask mode left it out.
    gaps: always `[N, C]`, |log-prob of the policy - that of the sampler|, 0 where unknown. known: always `[N, C]`, 1
    where the token has a finite sampling log-prob and counts in the loss, else 0.
    """

    weights: torch.Tensor
    log_ratios: torch.Tensor
    is_changed: torch.Tensor
    is_rejected: torch.Tensor
    gaps: torch.Tensor
    known: torch.Tensor

    @property
    def is_left_out(self) -> torch.Tensor:
        """`[N]`: completions of which no token is left."""
        return ~(self.known.bool() & ~self.is_rejected).any(dim=1)

    def counted(self) -> WeightSample:
        """Only what counts, flat and on the CPU. A sequence's weight counts once, however long the sequence is."""
        known = self.known.bool()
        counts = known if self.weights.shape == known.shape else known.any(dim=1, keepdim=True)
        values = (self.weights[counts], self.log_ratios[counts], self.is_changed[counts], self.gaps[known])
        return WeightSample(*(value.cpu() for value in values))


@dataclass(frozen=True)
class WeightSample:
    """Weights of one or more micro-batches: `[W]` weights, log_ratios and is_changed, `[T]` gaps of known tokens."""

    weights: torch.Tensor
    log_ratios: torch.Tensor
    is_changed: torch.Tensor
    gaps: torch.Tensor

    @classmethod
    def joined(cls, samples: Sequence[WeightSample]) -> WeightSample:
        """Those of a whole step, so that minima and maxima are not averages of those of its micro-batches."""
        names = ("weights", "log_ratios", "is_changed", "gaps")
        return cls(*(torch.cat([getattr(sample, name) for sample in samples]) for name in names))


def importance_weights(
    policy_logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor, spec: ImportanceSpec
) -> Importance:
    """Bounded importance weights.

    Args:
        policy_logps: `[N, C]` log-probs of the policy the gradient is taken from.
        sampling_logps: `[N, C]` log-probs of the policy that sampled. A token whose value is not finite is dropped
            (`known` 0, no part in a sequence's ratio): it is never read as a probability of one.
        mask: `[N, C]` 1 on tokens that count.
    """
    policy = policy_logps.detach()
    known = mask * sampling_logps.isfinite()
    log_ratios = torch.where(known.bool(), policy - sampling_logps, torch.zeros_like(policy))
    gaps = log_ratios.abs()
    if spec.is_sequence:
        log_ratios = log_ratios.sum(dim=1, keepdim=True)
    ratios = log_ratios.exp()
    # Bounds that do not contain 1 must not reach padding: a loss that multiplies a sequence's weights would see it.
    counts = known.any(dim=1, keepdim=True) if spec.is_sequence else known.bool()
    weights, is_rejected = _bounded(ratios, spec)
    weights = torch.where(counts, weights, torch.ones_like(weights))
    return Importance(weights, log_ratios, (weights != ratios) & counts, is_rejected & counts, gaps, known)


def _bounded(ratios: torch.Tensor, spec: ImportanceSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratios within cap and floor, and which of them are left out."""
    outside = torch.zeros_like(ratios, dtype=torch.bool)
    if spec.mode.endswith("truncate"):
        if spec.cap is None and spec.floor is None:
            return ratios, outside
        return ratios.clamp(min=spec.floor, max=spec.cap), outside
    if spec.floor is not None:
        outside |= ratios < spec.floor
    if spec.cap is not None:
        outside |= ratios > spec.cap
    return ratios.masked_fill(outside, 0.0), outside


def without_rejected(logps: torch.Tensor, result: Importance, *, is_product: bool) -> torch.Tensor:
    """The log-probs of the loss's forward, without gradient where a mask mode left a token or a completion out.

    A weight of 0 ends the policy term only. The KL term, and a policy ratio that is taken per sequence, would still
    pull at a rejected token. No value changes, and denominators go on counting the token.

    Args:
        logps: `[N, C]` with gradient.
        is_product: the loss multiplies the weights of a sequence (`vespo`), so that one rejected token rejects all.
    """
    rejected = result.is_rejected.any(dim=1, keepdim=True) if is_product else result.is_rejected
    return torch.where(rejected, logps.detach(), logps)
