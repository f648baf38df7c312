import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec, Scale, compute_advantages
from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.rollout.replay import (
    Origin,
    ReplayBuffer,
    ReplayGroup,
    ReplaySpec,
    join_replay_metrics,
    replace_zero_signal,
    replay_metrics,
    rewards_of,
    scored_groups,
    stored_logps_of,
    with_policy_logps,
)
from tests.support.replay_groups import make_group, make_kept

NAN = math.nan
SPEC = ReplaySpec(capacity=100, max_age=10, seed=3)


def rows_of(groups: tuple[ReplayGroup, ...]) -> list[int]:
    return [group.group.row.index for group in groups]


def filled(*groups: ReplayGroup, spec: ReplaySpec = SPEC) -> ReplayBuffer:
    return ReplayBuffer(spec, groups)


kept_groups = st.lists(
    st.builds(make_kept, st.integers(0, 9), st.integers(0, 20), st.sampled_from([0.1, 0.5, 0.5, 1.0])),
    max_size=12,
    unique_by=lambda group: group.key,
).map(lambda groups: sorted(groups, key=lambda group: group.step))


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_scored_group_has_its_rewards_its_step_and_its_signal() -> None:
    spec = AdvantageSpec(group_size=2, weights=(1.0, 1.0))
    values = torch.tensor([[0.0, NAN], [2.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
    one, two = scored_groups(
        [make_group(4, version=7), make_group(5)], values, compute_advantages(values, spec), spec, 8
    )
    # Weighted rewards 0 and 2, then 2 and 2.
    assert one.signal == pytest.approx(math.sqrt(2.0)) and two.signal == 0.0
    assert (one.step, one.version, one.key) == (8, 7, (8, 4, 0))
    assert one.rewards[1] == (2.0, 0.0) and math.isnan(one.rewards[0][1])
    torch.testing.assert_close(rewards_of([one, two]), values, rtol=0, atol=0, equal_nan=True)


def test_a_group_is_as_old_as_the_oldest_policy_that_had_a_part_in_it() -> None:
    group = make_group(0, version=5)
    mixed = replace(group, completions=(group.completions[0], replace(group.completions[1], adapter_version=3)))
    assert replace(make_kept(0), group=mixed).version == 3


def test_groups_without_signal_are_not_learned() -> None:
    buffer = filled()
    buffer.add([make_kept(0, 1, 0.0), make_kept(1, 1, 0.5)], step=1)
    assert rows_of(buffer.groups) == [1]


@given(st.permutations(range(6)))
def test_the_order_in_which_groups_finished_makes_no_difference(order: list[int]) -> None:
    groups = [make_kept(row, 1, 0.5 if row % 2 else 0.8) for row in range(6)]
    buffer = filled(spec=replace(SPEC, capacity=4))
    buffer.add([groups[row] for row in order], step=1)
    # All of 0.8, and of three equally strong ones the last.
    assert rows_of(buffer.groups) == [0, 2, 4, 5]


def test_the_weakest_group_goes_and_among_equals_the_oldest() -> None:
    buffer = filled(spec=replace(SPEC, capacity=3))
    buffer.add([make_kept(0, 1, 0.5), make_kept(1, 1, 0.2), make_kept(2, 1, 0.9)], step=1)
    buffer.add([make_kept(3, 2, 0.5)], step=2)
    assert rows_of(buffer.groups) == [0, 2, 3]
    buffer.add([make_kept(4, 3, 0.5)], step=3)
    assert rows_of(buffer.groups) == [2, 3, 4]
    buffer.add([make_kept(5, 4, 0.1)], step=4)
    assert rows_of(buffer.groups) == [2, 3, 4]


def test_a_group_is_drawn_until_it_is_too_old_and_then_forgotten() -> None:
    buffer = filled(spec=replace(SPEC, max_age=3))
    buffer.add([make_kept(0, 5)], step=5)
    assert [len(buffer.draw(1, step)) for step in (5, 6, 7, 8, 9)] == [0, 1, 1, 1, 0]
    buffer.add([], step=7)
    assert len(buffer) == 1
    buffer.add([], step=8)
    assert len(buffer) == 0


def test_a_rank_without_a_share_keeps_nothing() -> None:
    buffer = filled(spec=replace(SPEC, capacity=0))
    buffer.add([make_kept(0, 1)], step=1)
    assert len(buffer) == 0 and buffer.draw(3, 2) == ()


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.3, 0.3, 0.8])), max_size=30), st.integers(0, 5))
def test_it_holds_the_strongest_of_what_is_young_enough(arrivals: list[tuple[int, float]], capacity: int) -> None:
    """One group a step: the survivors are those that an exhaustive search over all that came would keep."""
    spec = ReplaySpec(capacity=capacity, max_age=4, seed=0)
    buffer = ReplayBuffer(spec)
    everything: list[ReplayGroup] = []
    for step, (row, signal) in enumerate(arrivals):
        group = make_kept(row, step, signal)
        everything = [old for old in [*everything, group] if step + 1 - old.step <= 4 and old.signal > 0.0]
        while len(everything) > capacity:
            everything.remove(min(everything, key=lambda old: (old.signal, old.step)))
        buffer.add([group], step)
        assert list(buffer.groups) == everything


# -- drawing ----------------------------------------------------------------------------------------------------------


@given(kept_groups, st.integers(0, 30), st.integers(0, 12))
def test_a_draw_is_a_set_of_kept_groups_of_a_right_age(groups: list[ReplayGroup], step: int, count: int) -> None:
    drawn = filled(*groups).draw(count, step)
    eligible = [group for group in groups if 1 <= step - group.step <= SPEC.max_age]
    assert len({group.key for group in drawn}) == len(drawn) == min(count, len(eligible))
    assert all(group in eligible for group in drawn)


@given(kept_groups, st.integers(0, 30), st.integers(0, 6), st.integers(0, 6))
def test_a_batch_drawn_in_pieces_is_the_same_batch(groups: list[ReplayGroup], step: int, one: int, two: int) -> None:
    buffer = filled(*groups)
    whole = buffer.draw(one + two, step)
    assert (*buffer.draw(one, step), *buffer.draw(two, step, skip=one)) == whole


def test_seed_step_and_rank_decide_and_nothing_else() -> None:
    groups = [make_kept(row) for row in range(20)]

    def drawn(step: int = 1, **changed: int) -> list[int]:
        return rows_of(filled(*groups, spec=replace(SPEC, **changed)).draw(20, step))

    assert drawn() == drawn()
    assert drawn() != drawn(step=2) and drawn() != drawn(seed=4) and drawn() != drawn(rank=1)
    assert sorted(drawn()) == list(range(20))


def test_how_often_a_group_comes_up_is_its_share_of_the_signal() -> None:
    buffer = filled(make_kept(0, 0, 3.0), make_kept(1, 0, 1.0), spec=replace(SPEC, max_age=5000))
    firsts = [rows_of(buffer.draw(1, step))[0] for step in range(1, 4001)]
    # 4000 draws at 3/4: the deviation is sqrt(4000 * 3/16) = 27, and the seed is fixed.
    assert abs(firsts.count(0) - 3000) < 110


# -- the batch --------------------------------------------------------------------------------------------------------


def test_groups_without_signal_are_replaced_in_place() -> None:
    buffer = filled(make_kept(7, 2, 1.0))
    fresh = [make_kept(0, 5, 0.0), make_kept(1, 5, 0.4), make_kept(2, 5, 0.0)]
    batch = replace_zero_signal(fresh, buffer, 5)
    assert rows_of(batch.groups) == [7, 1, 2]
    assert batch.origins == (Origin(2, 3), Origin(5, 0), Origin(5, 0))
    assert [origin.is_replayed for origin in batch.origins] == [True, False, False]
    assert batch.displaced == (0,)
    assert len(buffer) == 1, "it stays until it is too old"
    assert replay_metrics(batch, buffer) == {
        "replay/size": 1.0,
        "replay/replaced": 1.0,
        "replay/age_mean": 3.0,
        "replay/age_max": 3.0,
    }


def test_the_numbers_of_several_ranks_are_those_of_all_their_groups() -> None:
    first = {"replay/size": 2.0, "replay/replaced": 1.0, "replay/age_mean": 4.0, "replay/age_max": 4.0}
    second = {"replay/size": 1.0, "replay/replaced": 3.0, "replay/age_mean": 2.0, "replay/age_max": 3.0}
    assert join_replay_metrics([first, second, {"replay/size": 5.0, "replay/replaced": 0.0}]) == {
        "replay/size": 8.0,
        "replay/replaced": 4.0,
        "replay/age_mean": 2.5,
        "replay/age_max": 4.0,
    }


def test_without_a_replaced_group_there_is_no_age() -> None:
    buffer = filled()
    batch = replace_zero_signal([make_kept(0, 1, 0.0)], buffer, 1)
    assert replay_metrics(batch, buffer) == {"replay/size": 0.0, "replay/replaced": 0.0}


@given(kept_groups, st.lists(st.sampled_from([0.0, 0.7]), max_size=8), st.integers(0, 30))
def test_signal_stays_and_nothing_stands_twice(groups: list[ReplayGroup], signals: list[float], step: int) -> None:
    fresh = [make_kept(row, step, signal) for row, signal in enumerate(signals)]
    buffer = filled(*[group for group in groups if group.step < step])
    before = buffer.groups
    batch = replace_zero_signal(fresh, buffer, step)
    assert buffer.groups == before
    assert len({group.key for group in batch.groups}) == len(fresh)
    for place, (group, was) in enumerate(zip(batch.groups, fresh, strict=True)):
        assert group is was if place not in batch.displaced else (was.signal == 0.0 and group.signal > 0.0)
    num_eligible = sum(step - group.step <= SPEC.max_age for group in before)
    assert len(batch.displaced) == min(signals.count(0.0), num_eligible)


def test_chunks_of_a_batch_are_replaced_as_the_whole_batch_is() -> None:
    buffer = filled(*[make_kept(10 + row, 1) for row in range(5)])
    fresh = [make_kept(row, 4, 0.0 if row != 1 else 1.0) for row in range(5)]
    whole = replace_zero_signal(fresh, buffer, 4)
    first = replace_zero_signal(fresh[:2], buffer, 4)
    second = replace_zero_signal(fresh[2:], buffer, 4, skip=len(first.displaced))
    assert first.groups + second.groups == whole.groups


def test_a_replayed_group_is_padded_like_any_other() -> None:
    """Row 3 has 4 prompt tokens, row 0 has 1; the replayed completions are longer than the fresh ones."""
    buffer = filled(make_kept(3, 1, lengths=(3, 1), version=2))
    fresh = [make_kept(0, 4, 1.0, version=5), make_kept(1, 4, 0.0, version=5)]
    batch = replace_zero_signal(fresh, buffer, 4)
    padded = collate([group.group for group in batch.groups], pad_token_id=0, eos_token_id=9)
    assert padded.prompt_ids.tolist() == [[0, 0, 0, 7], [0, 0, 0, 7], [7, 7, 7, 7], [7, 7, 7, 7]]
    assert padded.completion_ids.tolist() == [[10, 0, 0], [10, 11, 0], [10, 11, 12], [10, 0, 0]]
    assert padded.completion_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert padded.adapter_versions == (5, 5, 2, 2)
    assert padded.sampling_logps is not None
    assert padded.sampling_logps[2].tolist() == pytest.approx([-0.1, -0.2, -0.3])


@pytest.mark.parametrize("scale", ["group", "none"])
def test_measured_by_its_own_group_a_replayed_group_has_the_advantages_it_had(scale: Scale) -> None:
    spec = AdvantageSpec(group_size=2, weights=(1.0,), scale=scale)
    old, fresh = make_kept(7, 1, 4.0), make_kept(0, 3, 2.0)
    alone = compute_advantages(rewards_of([old]), spec).values
    together = compute_advantages(rewards_of([fresh, old]), spec).values
    assert torch.equal(together[2:], alone)


def test_measured_by_the_batch_it_is_the_batch_it_now_stands_in() -> None:
    """Rewards 0, 2 of the fresh group and 0, 4 of the replayed one: mean 1.5, deviation sqrt(11 / 3)."""
    spec = AdvantageSpec(group_size=2, weights=(1.0,), scale="batch")
    values = compute_advantages(rewards_of([make_kept(0, 3, 2.0), make_kept(7, 1, 4.0)]), spec).values
    deviation = math.sqrt(11 / 3) + 1e-4
    assert values.tolist() == pytest.approx([-1 / deviation, 1 / deviation, -2 / deviation, 2 / deviation])


# -- log-probs of the time ---------------------------------------------------------------------------------------------


def test_stored_logps_come_back_padded_to_the_batch_they_now_stand_in() -> None:
    group = with_policy_logps(
        make_kept(0),
        torch.tensor([[-1.0, -9.0, -9.0], [-2.0, -3.0, -9.0]], requires_grad=True),
        torch.tensor([[1, 0, 0], [1, 1, 0]]),
    )
    assert group.policy_logps == ((-1.0,), (-2.0, -3.0))
    stored = stored_logps_of([make_kept(1), group], width=4)
    assert stored is not None
    expected = torch.tensor([[NAN] * 4, [NAN] * 4, [-1.0, NAN, NAN, NAN], [-2.0, -3.0, NAN, NAN]])
    assert torch.allclose(stored, expected, equal_nan=True) and stored.shape == (4, 4)


def test_nothing_stored_is_none() -> None:
    assert stored_logps_of([make_kept(0), make_kept(1)], width=2) is None
