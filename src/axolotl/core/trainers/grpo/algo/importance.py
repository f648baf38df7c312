"""Importance weights for completions that another policy sampled: the server's numerics, or older weights.

The weight of a token is pi_trainer(token) / pi_sampler(token), both after temperature, truncated (TIS) or masked (MIS)
so that single tokens cannot dominate; see https://fengyao.notion.site/off-policy-rl. In the sequence modes the ratio of
a completion is the product over its tokens.
"""

from __future__ import annotations

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
    """weights: `[N, C]` (token modes) or `[N, 1]` (sequence modes), detached. ratios: the same before cap and floor.
    known: `[N, C]` 1 where the token has a finite sampling log-prob and counts in the loss, else 0."""

    weights: torch.Tensor
    ratios: torch.Tensor
    known: torch.Tensor


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
    log_ratio = torch.where(known.bool(), policy - sampling_logps, torch.zeros_like(policy))
    if spec.is_sequence:
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratios = log_ratio.exp()
    if spec.mode.endswith("truncate"):
        weights = ratios.clamp(min=spec.floor, max=spec.cap)
    else:
        outside = torch.zeros_like(ratios, dtype=torch.bool)
        if spec.floor is not None:
            outside |= ratios < spec.floor
        if spec.cap is not None:
            outside |= ratios > spec.cap
        weights = ratios.masked_fill(outside, 0.0)
    return Importance(weights=weights, ratios=ratios, known=known)
