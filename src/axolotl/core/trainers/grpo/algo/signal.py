"""How much a group can teach: the spread of its rewards before anything divides it away."""

from __future__ import annotations

import torch

from axolotl.core.trainers.grpo.algo.advantages import Advantages, AdvantageSpec, nan_std


def group_signal(rewards_per_function: torch.Tensor, advantages: Advantages, spec: AdvantageSpec) -> torch.Tensor:
    """`[M]` signal strengths, 0 exactly where the group has none.

    The standard deviation of the weighted rewards; with `normalize_then_sum`, where opposite rewards do not cancel,
    the weighted sum of the functions' own. It does not depend on `scale`, so groups of different steps compare.

    Args:
        rewards_per_function: `[N, F]`, NaN where a function abstained; what `advantages` were computed from.
    """
    if spec.aggregation == "sum_then_normalize":
        spread = nan_std(advantages.rewards.view(-1, spec.group_size), dim=1).squeeze(1).nan_to_num(nan=0.0)
    else:
        scores = rewards_per_function.float()
        weights = torch.tensor(spec.weights, dtype=scores.dtype, device=scores.device).abs()
        spreads = nan_std(scores.view(-1, spec.group_size, scores.shape[1]), dim=1).squeeze(1)
        spread = (spreads.nan_to_num(nan=0.0) * weights).sum(dim=1)
    return spread.masked_fill(~advantages.has_signal, 0.0)
