"""Advantages against numbers worked by hand; `tests/contract/test_trl_oracle.py` holds them against TRL."""

import math

import pytest
import torch

from axolotl.core.trainers.grpo.algo.advantages import STD_FLOOR, AdvantageSpec, Scale, compute_advantages

NAN = math.nan


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def test_group_scale_divides_by_the_sample_deviation_of_each_group() -> None:
    # Group 1: 1, 0, 0, 1: mean 0.5, sample deviation sqrt(4 * 0.25 / 3) = 0.57735.
    result = compute_advantages(column(1, 0, 0, 1, 2, 2, 2, 2), AdvantageSpec(4, (1.0,)))
    up = 0.5 / (math.sqrt(1 / 3) + STD_FLOOR)
    assert result.values.tolist() == pytest.approx([up, -up, -up, up, 0, 0, 0, 0])
    assert result.has_signal.tolist() == [True, False]


def test_scale_none_leaves_differences_as_they_are() -> None:
    result = compute_advantages(column(3, 1, 10, 20), AdvantageSpec(2, (1.0,), scale="none"))
    assert result.values.tolist() == pytest.approx([1, -1, -5, 5])


def test_scale_batch_divides_by_the_deviation_of_the_whole_batch() -> None:
    # Rewards 3, 1, 10, 20: mean 8.5, squares 30.25 + 56.25 + 2.25 + 132.25 = 221, deviation sqrt(221 / 3).
    result = compute_advantages(column(3, 1, 10, 20), AdvantageSpec(2, (1.0,), scale="batch"))
    deviation = math.sqrt(221 / 3) + STD_FLOOR
    assert result.values.tolist() == pytest.approx([1 / deviation, -1 / deviation, -5 / deviation, 5 / deviation])


def test_weights_are_applied_before_the_comparison() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    result = compute_advantages(rewards, AdvantageSpec(2, (1.0, 0.5), scale="none"))
    assert result.rewards.tolist() == [1.0, 0.5]
    assert result.values.tolist() == pytest.approx([0.25, -0.25])


def test_a_function_that_abstains_does_not_count_as_zero_for_an_unscorable_completion() -> None:
    result = compute_advantages(column(1, NAN, 0), AdvantageSpec(3, (1.0,), scale="none"))
    assert result.values.tolist() == pytest.approx([0.5, 0.0, -0.5])
    assert result.is_unscorable.tolist() == [False, True, False]
    assert math.isnan(result.rewards[1])


def test_one_abstaining_function_among_two_is_left_out_of_that_sum() -> None:
    rewards = torch.tensor([[1.0, NAN], [1.0, 2.0]])
    result = compute_advantages(rewards, AdvantageSpec(2, (1.0, 1.0), scale="none"))
    assert result.rewards.tolist() == [1.0, 3.0]
    assert result.values.tolist() == pytest.approx([-1.0, 1.0])


def test_a_group_with_a_single_scored_completion_teaches_nothing() -> None:
    result = compute_advantages(column(5, NAN, NAN), AdvantageSpec(3, (1.0,)))
    assert result.values.tolist() == [0, 0, 0]
    assert result.has_signal.tolist() == [False]


def test_normalize_then_sum_gives_functions_of_different_size_the_same_say() -> None:
    # Both functions rank the two completions oppositely; one is a hundred times larger. After normalising each within
    # the group they cancel, so nothing is left to learn.
    rewards = torch.tensor([[100.0, 0.0], [0.0, 1.0]])
    result = compute_advantages(rewards, AdvantageSpec(2, (1.0, 1.0), aggregation="normalize_then_sum"))
    assert result.values.abs().max() < 1.0
    summed = compute_advantages(rewards, AdvantageSpec(2, (1.0, 1.0), scale="none"))
    assert summed.values.tolist() == pytest.approx([49.5, -49.5])


@pytest.mark.parametrize("size", [1e-30, 1e19, 1e30, 1.5e38])
def test_large_rewards_are_compared_like_small_ones(size: float) -> None:
    """0 and 2: mean 1, sample deviation sqrt(2). The square of 1e20 and more is none that float32 holds."""
    deviation = math.sqrt(2) * size + STD_FLOOR
    for scale in ("group", "batch"):
        result = compute_advantages(column(0, 2 * size), AdvantageSpec(2, (1.0,), scale=scale))
        assert result.values.dtype == torch.float32 and result.has_signal.tolist() == [True]
        assert result.values.tolist() == pytest.approx([-size / deviation, size / deviation])
    spec = AdvantageSpec(2, (1.0, 1.0), aggregation="normalize_then_sum")
    rewards = torch.tensor([[0.0, 0.0], [2 * size, 1.0]])
    # Each function by itself, then their sum, -a and a, by its own deviation sqrt(2) a.
    a = size / deviation + 0.5 / (math.sqrt(0.5) + STD_FLOOR)
    expected = a / (math.sqrt(2) * a + STD_FLOOR)
    assert compute_advantages(rewards, spec).values.tolist() == pytest.approx([-expected, expected])


def test_the_widest_difference_that_float32_holds_is_one() -> None:
    """-3e38 and 3e38: mean 0, sample deviation 4.2e38, which float32 does not hold."""
    result = compute_advantages(column(-3e38, 3e38), AdvantageSpec(2, (1.0,)))
    assert result.values.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_whose_sum_is_infinite_have_no_advantage_that_looks_like_one(scale: Scale) -> None:
    result = compute_advantages(column(3e38, 3e38, 0, 1, 0, 0), AdvantageSpec(3, (1.0,), scale=scale))
    assert not result.values[:3].isfinite().any()
    assert scale == "batch" or result.values[3:].isfinite().all()
