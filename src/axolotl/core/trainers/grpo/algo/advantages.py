"""Group-relative advantages: how much better a completion is than the others of its prompt.

Equation 3 of DeepSeekMath (arXiv:2402.03300) for one reward; `normalize_then_sum` is the multi-reward form of GDPO
(arXiv:2601.05242). A function that abstains for a completion has NaN there; a completion for which every function
abstains is unscorable: it is left out of its group's statistics and has advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

# Keeps the quotient finite for a group of equal rewards.
STD_FLOOR = 1e-4

Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class AdvantageSpec:
    """group_size: G. weights: F reward weights. scale: which standard deviation divides (`normalize_then_sum` always
    divides by the group's, then by the batch's)."""

    group_size: int
    weights: tuple[float, ...]
    aggregation: Aggregation = "sum_then_normalize"
    scale: Scale = "group"

    @property
    def needs_all(self) -> bool:
        """Whether a group's advantages depend on the other groups of the step."""
        return self.scale == "batch" or self.aggregation == "normalize_then_sum"


@dataclass(frozen=True)
class Advantages:
    """values: `[N]` advantages. rewards: `[N]` weighted sums, NaN where unscorable. has_signal: `[N/G]`, whether the
    rewards of the group differ. is_unscorable: `[N]`."""

    values: torch.Tensor
    rewards: torch.Tensor
    has_signal: torch.Tensor
    is_unscorable: torch.Tensor

    def of_groups(self, indices: Sequence[int], group_size: int) -> Advantages:
        """Those of some of the groups, as they are."""
        rows = [row for i in indices for row in range(i * group_size, (i + 1) * group_size)]
        has_signal = self.has_signal[list(indices)]
        return Advantages(self.values[rows], self.rewards[rows], has_signal, self.is_unscorable[rows])


def join_advantages(parts: Sequence[Advantages]) -> Advantages:
    """Those of several groups of one step, one after the other."""
    return Advantages(
        values=torch.cat([part.values for part in parts]),
        rewards=torch.cat([part.rewards for part in parts]),
        has_signal=torch.cat([part.has_signal for part in parts]),
        is_unscorable=torch.cat([part.is_unscorable for part in parts]),
    )


def nan_std(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation along `dim` with Bessel's correction, over the entries that are not NaN; the dimension stays.

    NaN where fewer than two entries count. The squares of rewards that float32 holds need not fit into it, and what is
    divided by an infinite deviation is a 0 that looks like an advantage: then it is a float64.
    """
    deviation = _nan_std(values, dim)
    is_too_large = deviation.isinf()
    if not is_too_large.any():
        return deviation
    return torch.where(is_too_large, _nan_std(values.double(), dim), deviation.double())


def _nan_std(values: torch.Tensor, dim: int) -> torch.Tensor:
    count = (~values.isnan()).sum(dim=dim, keepdim=True)
    mean = values.nanmean(dim=dim, keepdim=True)
    squares = (values - mean).square().nansum(dim=dim, keepdim=True)
    return torch.where(count > 1, squares / (count - 1).clamp(min=1), torch.nan).sqrt()


def compute_advantages(rewards_per_function: torch.Tensor, spec: AdvantageSpec) -> Advantages:
    """Advantages of whole groups.

    Args:
        rewards_per_function: `[N, F]` float32, NaN where a function abstained, N a multiple of `spec.group_size`.
    """
    scores = rewards_per_function.float()
    weights = torch.tensor(spec.weights, dtype=scores.dtype, device=scores.device)
    is_unscorable = scores.isnan().all(dim=1)
    rewards = (scores * weights).nansum(dim=1).masked_fill(is_unscorable, torch.nan)
    grouped = rewards.view(-1, spec.group_size)
    has_signal = _has_signal(scores.view(-1, spec.group_size, scores.shape[1]), grouped, spec.aggregation)
    if spec.aggregation == "sum_then_normalize":
        values = _sum_then_normalize(grouped, spec.scale)
    else:
        values = _normalize_then_sum(scores, weights, is_unscorable, spec.group_size)
    # Equal rewards may differ from their mean by a rounding, which the divisions would blow up. What is not finite
    # elsewhere (rewards so large that their sum is not) stays so: the trainer skips the step and says so.
    teaches = has_signal.repeat_interleave(spec.group_size) & ~is_unscorable
    return Advantages(
        values=torch.where(teaches, values, 0.0).float(),
        rewards=rewards,
        has_signal=has_signal,
        is_unscorable=is_unscorable,
    )


def _sum_then_normalize(grouped: torch.Tensor, scale: Scale) -> torch.Tensor:
    """`[M, G]` rewards -> `[N]` advantages, float64 where a deviation is."""
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (nan_std(grouped, dim=1) + STD_FLOOR)
    elif scale == "batch":
        centred = centred / (nan_std(grouped.flatten(), dim=0) + STD_FLOOR)
    return centred.flatten()


def _normalize_then_sum(
    scores: torch.Tensor, weights: torch.Tensor, is_unscorable: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Each function's rewards are normalised within the group, weighted, summed, then normalised over the batch."""
    grouped = scores.view(-1, group_size, scores.shape[1])
    normalised = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (nan_std(grouped, dim=1) + STD_FLOOR)
    total = (normalised.view_as(scores) * weights).nansum(dim=1).masked_fill(is_unscorable, torch.nan)
    return (total - total.nanmean()) / (nan_std(total, dim=0) + STD_FLOOR)


def _has_signal(scores: torch.Tensor, grouped: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    """`[M]`: whether the group's rewards differ, which is what its advantages are made of."""
    if aggregation == "sum_then_normalize":
        return _differ(grouped)
    return _differ(scores).any(dim=1)


def _differ(values: torch.Tensor) -> torch.Tensor:
    """Whether the entries along dimension 1 that are not NaN differ."""
    return values.nan_to_num(nan=-torch.inf).amax(dim=1) > values.nan_to_num(nan=torch.inf).amin(dim=1)
