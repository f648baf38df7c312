import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axolotl.core.trainers.grpo.rollout.rank_shares import rank_share
from axolotl.core.trainers.grpo.rollout.reroll import (
    RerollQueue,
    RerollSpec,
    first_reroll_step,
    most_rerolls,
    reroll_metrics,
    slots,
)
from axolotl.core.trainers.grpo.types import Slot
from tests.support.replay_groups import make_group

NAN = math.nan


def queue(*waiting: int, capacity: int = 100, start_step: int = 0, num_ranks: int = 1, rank: int = 0) -> RerollQueue:
    made = RerollQueue(RerollSpec(capacity, start_step, num_ranks, rank))
    fail(made, *waiting)
    return made


def fail(target: RerollQueue, *rows: int) -> None:
    learn(target, dict.fromkeys(rows, (0.0, 0.0)))


def succeed(target: RerollQueue, *rows: int) -> None:
    learn(target, dict.fromkeys(rows, (0.0, 1.0)))


def learn(target: RerollQueue, rewards: dict[int, tuple[float, float]], threshold: float = 0.0) -> None:
    if rewards:
        target.learn([make_group(row) for row in rewards], torch.tensor(list(rewards.values())), threshold)


# -- what is queued ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "threshold", "is_queued"),
    [
        ((0.0, 0.0), 0.0, True),
        ((-1.0, 0.0), 0.0, True),
        ((0.0, 0.1), 0.0, False),
        ((0.5, 0.5), 0.5, True),
        # Rewards are single precision: 0.1 is a little more there.
        ((0.1, 0.1), 0.1, True),
        ((0.0, 0.6), 0.5, False),
        ((0.0, 0.0), -0.5, False),
        # Who could not be scored says nothing: the others decide, and without others nobody does.
        ((NAN, 0.0), 0.0, True),
        ((NAN, 1.0), 0.0, False),
        ((NAN, NAN), 0.0, False),
    ],
)
def test_a_group_failed_when_everything_that_was_scored_did(
    rewards: tuple[float, float], threshold: float, is_queued: bool
) -> None:
    target = queue()
    learn(target, {5: rewards}, threshold)
    assert target.waiting == ((5,) if is_queued else ())


def test_first_in_first_out_and_nobody_twice() -> None:
    target = queue(3)
    fail(target, 2, 1)
    fail(target, 1, 4)
    assert target.waiting == (3, 1, 2, 4), "by step, and within a step by row, whoever finished first"
    assert target.take(0, 2) == (Slot(3, 1), Slot(1, 1))
    assert target.waiting == (2, 4)


def test_who_fails_again_goes_to_the_end_with_the_next_number_and_who_succeeds_leaves() -> None:
    target = queue(1, 2, 3)
    assert target.take(0, 2) == (Slot(1, 1), Slot(2, 1))
    learn(target, {1: (0.0, 0.0), 2: (0.0, 1.0)})
    assert target.waiting == (3, 1)
    assert target.take(1, 5) == (Slot(3, 1), Slot(1, 2))


def test_a_prompt_that_succeeds_while_it_waits_leaves() -> None:
    """Its turn in the next epoch came first."""
    target = queue(1, 2)
    succeed(target, 1)
    assert target.waiting == (2,)


def test_a_prompt_that_could_not_be_scored_is_not_asked_for_ever() -> None:
    target = queue(1, 2)
    target.take(0, 1)
    learn(target, {1: (NAN, NAN), 2: (NAN, NAN)})
    assert target.waiting == (2,)


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    target = queue(1, 2, 3, capacity=2)
    fail(target, 1, 4)
    assert target.waiting == (1, 2)
    assert reroll_metrics(target, [Slot(0), Slot(9, 1)]) == {
        "reroll/size": 2.0,
        "reroll/dropped": 2.0,
        "reroll/groups": 1.0,
    }


# -- when it comes back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "planned", "first"), [(0.07, 100, 7), (0.5, 7, 4), (0.0, 5, 0), (1.0, 9, 9), (0.3, 10, 3)]
)
def test_the_first_step_that_may_try_again(fraction: float, planned: int, first: int) -> None:
    assert first_reroll_step(fraction, planned) == first


def test_nobody_comes_back_before_the_start() -> None:
    target = queue(1, start_step=3)
    assert [target.take(step, 1) for step in (0, 2, 3)] == [(), (), (Slot(1, 1),)]


def test_no_more_wait_than_can_come_back() -> None:
    assert most_rerolls(first_reroll_step(0.75, 20), 20, 2) == 10
    assert most_rerolls(first_reroll_step(1.0, 20), 20, 2) == 0
    assert most_rerolls(first_reroll_step(0.75, 20), 20, 2, steps_per_rollout=4) == 4


def test_a_prompt_of_the_batch_keeps_its_place_in_the_queue() -> None:
    target = queue(1, 2, 3)
    assert target.take(0, 2, exclude=[1, 8]) == (Slot(2, 1), Slot(3, 1))
    assert target.waiting == (1,)


def test_they_stand_in_the_last_slots_of_a_batch() -> None:
    assert slots([4, 5, 6], ()) == (Slot(4), Slot(5), Slot(6))
    assert slots([4, 5, 6], [Slot(9, 2)]) == (Slot(4), Slot(5), Slot(9, 2))
    assert slots([4, 5], [Slot(9, 2), Slot(8, 1)]) == (Slot(9, 2), Slot(8, 1))


def test_two_ranks_never_draw_a_prompt_under_the_same_number() -> None:
    numbers = []
    for rank in range(2):
        target = queue(5, num_ranks=2, rank=rank)
        for step in range(3):
            numbers += [slot.reroll for slot in target.take(step, 1)]
            fail(target, 5)
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


def test_a_limit_of_one_a_batch_comes_round_to_both_ranks() -> None:
    queues = [queue(1, 2, num_ranks=2, rank=rank) for rank in range(2)]
    taken = [[len(q.take(step, rank_share(1, 2, rank, step))) for rank, q in enumerate(queues)] for step in range(4)]
    assert taken == [[1, 0], [0, 1], [1, 0], [0, 1]]


# -- over a whole run -------------------------------------------------------------------------------------------------

events = st.lists(
    st.one_of(
        st.tuples(st.just("learn"), st.lists(st.tuples(st.integers(0, 7), st.booleans()), unique_by=lambda e: e[0])),
        st.tuples(st.just("take"), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(events, st.integers(0, 4), st.integers(0, 40))
def test_it_does_what_a_plain_list_would_and_a_restored_one_does_the_same(
    run: list[tuple[str, object]], capacity: int, stop: int
) -> None:
    target, model, drawn = queue(capacity=capacity), list[int](), list[Slot]()
    for index, (kind, argument) in enumerate(run):
        if index == stop:
            state = json.loads(json.dumps(target.state()))
            target = queue(capacity=capacity)
            target.restore(state)
            assert target.state() == state
        if kind == "take":
            assert isinstance(argument, int)
            taken = target.take(index, argument)
            assert [slot.row for slot in taken] == model[:argument]
            del model[:argument]
            drawn += taken
        else:
            assert isinstance(argument, list)
            learn(target, {row: (0.0, 0.0 if failed else 1.0) for row, failed in argument})
            for row, failed in sorted(argument):
                if not failed and row in model:
                    model.remove(row)
                if failed and row not in model and len(model) < capacity:
                    model.append(row)
        assert list(target.waiting) == model
    assert len(set(drawn)) == len(drawn), "a prompt is never drawn twice with the same seeds"
    for row in {slot.row for slot in drawn}:
        assert [slot.reroll for slot in drawn if slot.row == row] == list(
            range(1, 1 + [s.row for s in drawn].count(row))
        )


def test_a_smaller_queue_takes_over_the_first() -> None:
    target = queue(capacity=1)
    target.restore(queue(1, 2, 3).state())
    assert target.waiting == (1,)
