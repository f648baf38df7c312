import math
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axolotl.core.trainers.grpo.rollout.replay import ReplayBuffer, ReplayGroup, ReplaySpec
from axolotl.core.trainers.grpo.rollout.replay_files import load_replay, save_replay
from tests.support.replay_groups import make_group, make_kept, make_row

SPEC = ReplaySpec(capacity=8, max_age=10, seed=1)
ROWS = [make_row(index) for index in range(10)]
single = st.floats(width=32, allow_infinity=False)


@st.composite
def kept(draw: st.DrawFn) -> ReplayGroup:
    lengths = draw(st.lists(st.integers(0, 3), min_size=2, max_size=3))
    num_functions = draw(st.integers(1, 2))
    group = make_group(draw(st.integers(0, 9)), lengths, version=draw(st.integers(0, 9)))
    rewards = tuple(tuple(draw(single) for _ in range(num_functions)) for _ in lengths)
    # An empty completion was trained as one end token.
    logps = tuple(tuple(draw(single) for _ in range(max(1, length))) for length in lengths)
    return ReplayGroup(
        group, rewards, draw(st.integers(0, 5)), draw(st.floats(1e-6, 10.0)), draw(st.none() | st.just(logps))
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(kept(), max_size=8, unique_by=lambda group: group.key))
def test_a_buffer_comes_back_as_it_was_and_draws_the_same(tmp_path: Path, groups: list[ReplayGroup]) -> None:
    buffer = ReplayBuffer(SPEC, groups)
    save_replay(buffer, tmp_path)
    again = load_replay(tmp_path, SPEC, ROWS)
    assert repr(again.groups) == repr(buffer.groups)
    assert repr(again.draw(8, 6)) == repr(buffer.draw(8, 6))


def test_a_smaller_buffer_keeps_the_strongest(tmp_path: Path) -> None:
    groups = [make_kept(0, 1, 0.5), make_kept(1, 1, 0.9), make_kept(2, 1, 0.7)]
    save_replay(ReplayBuffer(SPEC, groups), tmp_path)
    again = load_replay(tmp_path, replace(SPEC, capacity=2), ROWS)
    assert [group.group.row.index for group in again.groups] == [1, 2]


def test_a_reward_that_a_function_withheld_stays_withheld(tmp_path: Path) -> None:
    save_replay(ReplayBuffer(SPEC, [replace(make_kept(0), rewards=((math.nan,), (1.0,)))]), tmp_path)
    (group,) = load_replay(tmp_path, SPEC, ROWS).groups
    assert math.isnan(group.rewards[0][0]) and group.rewards[1] == (1.0,)
