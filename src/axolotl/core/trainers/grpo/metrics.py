"""Numbers of one step under TRL's names, as plain functions of what happened.

Each returns a flat dict of floats. A value that does not exist (no reward, no finite ratio) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axolotl.core.trainers.grpo.algo.advantages import Advantages, nan_std
from axolotl.core.trainers.grpo.algo.importance import WeightSample
from axolotl.core.trainers.grpo.types import RolloutBatch


@dataclass(frozen=True)
class StepSample:
    """What the numbers of one step are made of, so that those of several ranks are the numbers of their union.

    lengths, is_truncated: `[N]`. versions: N ints. values: `[N, F]` with NaN where a function abstained. rewards: `[N]`
    weighted sums. has_signal: `[N/G]`.
    """

    lengths: torch.Tensor
    is_truncated: torch.Tensor
    versions: tuple[int, ...]
    values: torch.Tensor
    rewards: torch.Tensor
    has_signal: torch.Tensor

    @classmethod
    def of(cls, batch: RolloutBatch, values: torch.Tensor, advantages: Advantages) -> StepSample:
        lengths = batch.completion_mask.sum(dim=1).float()
        return cls(
            lengths, batch.is_truncated, batch.adapter_versions, values, advantages.rewards, advantages.has_signal
        )

    @classmethod
    def joined(cls, samples: Sequence[StepSample]) -> StepSample:
        return cls(
            lengths=torch.cat([sample.lengths for sample in samples]),
            is_truncated=torch.cat([sample.is_truncated for sample in samples]),
            versions=tuple(version for sample in samples for version in sample.versions),
            values=torch.cat([sample.values for sample in samples]),
            rewards=torch.cat([sample.rewards for sample in samples]),
            has_signal=torch.cat([sample.has_signal for sample in samples]),
        )


def completion_metrics(sample: StepSample) -> dict[str, float]:
    """Lengths in tokens, and the share that ran into `max_completion_length`."""
    lengths = sample.lengths
    finished = lengths[~sample.is_truncated]
    # TRL reports 0 where nothing terminated, so that the curve has no hole.
    finished = finished if finished.numel() else torch.zeros(1)
    return {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": sample.is_truncated.float().mean().item(),
        "completions/mean_terminated_length": finished.mean().item(),
        "completions/min_terminated_length": finished.min().item(),
        "completions/max_terminated_length": finished.max().item(),
    }


def reward_metrics(names: Sequence[str], sample: StepSample) -> dict[str, float]:
    """Means and deviations, one pair a function and one for the weighted sum."""
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        metrics.update(_moments(sample.values[:, index], f"rewards/{name}/mean", f"rewards/{name}/std"))
    metrics.update(_moments(sample.rewards, "reward", "reward_std"))
    metrics["frac_reward_zero_std"] = 1.0 - sample.has_signal.float().mean().item()
    return metrics


def staleness_metrics(sample: StepSample, current_version: int) -> dict[str, float]:
    """How many optimizer steps ago the policies that sampled this batch existed."""
    ages = [current_version - version for version in sample.versions]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}


def sampling_metrics(sample: WeightSample) -> dict[str, float]:
    """How far trainer and sampler disagree about the sampled tokens, and the importance weights that follow.

    Weights before (`_unclipped`) and after cap and floor, the share that these changed, and the effective sample size,
    which is a share too: 1 where all weights are equal, 1/n where one of n has everything.
    """
    if not sample.gaps.numel():
        return {}
    weights, ratios = sample.weights.double(), sample.log_ratios.double().exp()
    return {
        "sampling/sampling_logp_difference/mean": sample.gaps.mean().item(),
        "sampling/sampling_logp_difference/max": sample.gaps.max().item(),
        "sampling/importance_sampling_ratio/min": weights.min().item(),
        "sampling/importance_sampling_ratio/mean": weights.mean().item(),
        "sampling/importance_sampling_ratio/max": weights.max().item(),
        "sampling/importance_sampling_ratio_unclipped/min": ratios.min().item(),
        "sampling/importance_sampling_ratio_unclipped/mean": ratios.mean().item(),
        "sampling/importance_sampling_ratio_unclipped/max": ratios.max().item(),
        "sampling/importance_sampling_ratio_changed": sample.is_changed.float().mean().item(),
        "sampling/effective_sample_size": effective_share(weights),
        # Only proportions matter, and a ratio of the largest to itself cannot overflow.
        "sampling/effective_sample_size_unclipped": effective_share(
            (sample.log_ratios.double() - sample.log_ratios.max()).exp()
        ),
    }


def off_policy_metrics(is_dropped: torch.Tensor) -> dict[str, float]:
    """`[N]`: the share of completions that `off_policy_mask_threshold` dropped."""
    return {"sampling/off_policy_masked": is_dropped.float().mean().item()} if is_dropped.numel() else {}


def effective_share(weights: torch.Tensor) -> float:
    """Kish's effective sample size over the number of weights; 0 where all are 0."""
    squares = weights.square().sum().item()
    return weights.sum().item() ** 2 / (squares * weights.numel()) if squares > 0 else 0.0


def _moments(values: torch.Tensor, mean_name: str, std_name: str) -> dict[str, float]:
    if values.isnan().all():
        return {}
    metrics = {mean_name: values.nanmean().item()}
    deviation = nan_std(values, dim=0).item()
    if deviation == deviation:
        metrics[std_name] = deviation
    return metrics
