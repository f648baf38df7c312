"""Numbers of a step against numbers worked by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from axolotl.core.trainers.grpo.algo.importance import ImportanceMode, ImportanceSpec, WeightSample, importance_weights
from axolotl.core.trainers.grpo.metrics import effective_share, off_policy_metrics, sampling_metrics

LN2 = math.log(2.0)
# Ratios 4, 1/2, 1 and padding; 2, 2, 2, 2.
POLICY = torch.tensor([[2 * LN2, -LN2, 0.0, 0.0], [LN2, LN2, LN2, LN2]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def measured(mode: ImportanceMode, cap: float, floor: float | None = None) -> dict[str, float]:
    result = importance_weights(POLICY, torch.zeros(2, 4), MASK, ImportanceSpec(mode, cap, floor))
    return sampling_metrics(result.counted())


def test_tokens_cut_to_bounds() -> None:
    # Before: 4, 1/2, 1, 2, 2, 2, 2, sum 13.5, sum of squares 33.25. After: 3, 0.8, 1, 2 x 4: 12.8 and 26.64.
    assert measured("token_truncate", 3.0, 0.8) == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": 7 * LN2 / 7,
            "sampling/sampling_logp_difference/max": 2 * LN2,
            "sampling/importance_sampling_ratio/min": 0.8,
            "sampling/importance_sampling_ratio/mean": 12.8 / 7,
            "sampling/importance_sampling_ratio/max": 3.0,
            "sampling/importance_sampling_ratio_unclipped/min": 0.5,
            "sampling/importance_sampling_ratio_unclipped/mean": 13.5 / 7,
            "sampling/importance_sampling_ratio_unclipped/max": 4.0,
            "sampling/importance_sampling_ratio_changed": 2 / 7,
            "sampling/effective_sample_size": 12.8**2 / (7 * 26.64),
            "sampling/effective_sample_size_unclipped": 13.5**2 / (7 * 33.25),
        }
    )


def test_sequences_that_are_masked() -> None:
    # The ratios of the two sequences are 2 and 16; the second is left out.
    found = measured("sequence_mask", 3.0)
    assert found["sampling/importance_sampling_ratio/min"] == 0.0
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0)
    assert found["sampling/importance_sampling_ratio_unclipped/mean"] == pytest.approx(9.0)
    assert found["sampling/importance_sampling_ratio_changed"] == 0.5
    assert found["sampling/effective_sample_size"] == pytest.approx(0.5)
    assert found["sampling/effective_sample_size_unclipped"] == pytest.approx(18**2 / (2 * (4 + 256)))


@pytest.mark.parametrize(
    ("weights", "share"),
    [([1.0, 1.0, 1.0, 1.0], 1.0), ([0.0, 0.0, 5.0, 0.0], 0.25), ([0.0, 0.0], 0.0), ([3.0, 1.0], 16 / 20)],
)
def test_effective_share(weights: list[float], share: float) -> None:
    assert effective_share(torch.tensor(weights, dtype=torch.float64)) == pytest.approx(share)


def test_a_sequence_far_away_does_not_overflow() -> None:
    sample = WeightSample(
        torch.tensor([3.0, 3.0]), torch.tensor([200.0, 200.0]), torch.tensor([True, True]), torch.tensor([2.0])
    )
    found = sampling_metrics(sample)
    assert found["sampling/effective_sample_size_unclipped"] == pytest.approx(1.0)
    assert all(math.isfinite(value) for value in found.values())
    json.dumps(found, allow_nan=False)


def test_nothing_known_is_no_number() -> None:
    none = torch.zeros(0)
    assert sampling_metrics(WeightSample(none, none, none.bool(), none)) == {}


def test_the_share_that_the_off_policy_mask_dropped() -> None:
    assert off_policy_metrics(torch.tensor([True, False, False, False])) == {"sampling/off_policy_masked": 0.25}
    assert off_policy_metrics(torch.zeros(0, dtype=torch.bool)) == {}
