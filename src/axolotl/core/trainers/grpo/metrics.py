"""Numbers of one step under TRL's names, as plain functions of what happened.

Each returns a flat dict of floats. A value that does not exist (no reward, no finite ratio) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from axolotl.core.trainers.grpo.algo.advantages import Advantages, nan_std
from axolotl.core.trainers.grpo.types import RolloutBatch


def completion_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Lengths in tokens, and the share that ran into `max_completion_length`."""
    lengths = batch.completion_mask.sum(dim=1).float()
    finished = lengths[~batch.is_truncated]
    # TRL reports 0 where nothing terminated, so that the curve has no hole.
    finished = finished if finished.numel() else torch.zeros(1)
    return {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": batch.is_truncated.float().mean().item(),
        "completions/mean_terminated_length": finished.mean().item(),
        "completions/min_terminated_length": finished.min().item(),
        "completions/max_terminated_length": finished.max().item(),
    }


def reward_metrics(names: Sequence[str], values: torch.Tensor, advantages: Advantages) -> dict[str, float]:
    """Means and deviations, one pair a function and one for the weighted sum.

    Args:
        values: `[N, F]` with NaN where a function abstained.
    """
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        metrics.update(_moments(values[:, index], f"rewards/{name}/mean", f"rewards/{name}/std"))
    metrics.update(_moments(advantages.rewards, "reward", "reward_std"))
    metrics["frac_reward_zero_std"] = 1.0 - advantages.has_signal.float().mean().item()
    return metrics


def staleness_metrics(batch: RolloutBatch, current_version: int) -> dict[str, float]:
    """How many optimizer steps ago the policies that sampled this batch existed."""
    ages = [current_version - version for version in batch.adapter_versions]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}


def sampling_metrics(logp_gaps: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
    """How far trainer and sampler disagree about the sampled tokens, and the importance weights that follow.

    Args:
        logp_gaps: `[T]` absolute differences of known tokens. weights: the weights as applied, one a token or, in the
            sequence modes, one a completion.
    """
    if not logp_gaps.numel():
        return {}
    return {
        "sampling/sampling_logp_difference/mean": logp_gaps.mean().item(),
        "sampling/sampling_logp_difference/max": logp_gaps.max().item(),
        "sampling/importance_sampling_ratio/min": weights.min().item(),
        "sampling/importance_sampling_ratio/mean": weights.mean().item(),
        "sampling/importance_sampling_ratio/max": weights.max().item(),
    }


def _moments(values: torch.Tensor, mean_name: str, std_name: str) -> dict[str, float]:
    if values.isnan().all():
        return {}
    metrics = {mean_name: values.nanmean().item()}
    deviation = nan_std(values, dim=0).item()
    if deviation == deviation:
        metrics[std_name] = deviation
    return metrics
