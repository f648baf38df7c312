import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec, Aggregation, Scale, compute_advantages, nan_std
from axolotl.core.trainers.grpo.algo.signal import group_signal

NAN = math.nan


def signal(values: list[list[float]], spec: AdvantageSpec) -> list[float]:
    rewards = torch.tensor(values)
    return group_signal(rewards, compute_advantages(rewards, spec), spec).tolist()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_it_is_the_spread_of_the_weighted_rewards_whatever_divides_them_later(scale: Scale) -> None:
    # Weighted sums 0, 2 and 6, 6, 6: deviations sqrt(((0 - 1)^2 + (2 - 1)^2) / 1) and 0.
    spec = AdvantageSpec(group_size=2, weights=(1.0, 2.0), scale=scale)
    assert signal([[0.0, 0.0], [0.0, 1.0], [4.0, 1.0], [2.0, 2.0]], spec) == pytest.approx([math.sqrt(2.0), 0.0])


def test_opposite_rewards_cancel_in_a_sum_but_not_when_each_is_normalised() -> None:
    values = [[0.0, 1.0], [1.0, 0.0]]
    summed = AdvantageSpec(group_size=2, weights=(1.0, 1.0))
    assert signal(values, summed) == [0.0]
    # Each function's deviation is sqrt(1/2); weights 1 and 3.
    each = AdvantageSpec(group_size=2, weights=(1.0, 3.0), aggregation="normalize_then_sum")
    assert signal(values, each) == pytest.approx([4.0 * math.sqrt(0.5)])


def test_a_penalty_is_as_much_signal_as_a_reward() -> None:
    spec = AdvantageSpec(group_size=2, weights=(1.0, -3.0), aggregation="normalize_then_sum")
    assert signal([[0.0, 1.0], [1.0, 0.0]], spec) == pytest.approx([4.0 * math.sqrt(0.5)])


def test_equal_rewards_that_differ_from_their_mean_by_a_rounding_are_no_signal() -> None:
    rewards = torch.full((1, 3), 0.9)
    assert nan_std(rewards, dim=1).item() > 0.0, "choose another number"
    assert signal([[0.9], [0.9], [0.9]], AdvantageSpec(group_size=3, weights=(1.0,))) == [0.0]


def test_a_completion_nobody_could_score_takes_no_part() -> None:
    spec = AdvantageSpec(group_size=3, weights=(1.0,))
    assert signal([[0.0], [NAN], [2.0], [NAN], [NAN], [1.0]], spec) == pytest.approx([math.sqrt(2.0), 0.0])


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=6, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["sum_then_normalize", "normalize_then_sum"]),
)
def test_it_is_zero_exactly_where_the_group_has_no_signal(groups: list[list[float]], aggregation: Aggregation) -> None:
    spec = AdvantageSpec(group_size=3, weights=(1.0, 0.25), aggregation=aggregation)
    rewards = torch.tensor(groups).view(-1, 2)
    advantages = compute_advantages(rewards, spec)
    signals = group_signal(rewards, advantages, spec)
    assert (signals > 0).tolist() == advantages.has_signal.tolist()
