"""What ranks agree on, in two real processes: all go on, or all end with the same code."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from axolotl.core.trainers.grpo.distributed import World
from axolotl.errors import InternalError, Interrupted, RewardError, ServerError
from tests.support.rank_processes import codes, killed, on_two_ranks

pytestmark = pytest.mark.slow


def fails_on(world: World, rank: int, error: Exception) -> None:
    def act() -> None:
        if world.rank == rank:
            raise error

    world.together(act)


def numbers(world: World) -> list[object]:
    found: list[object] = [world.total(world.rank + 1), world.largest(world.rank), world.gather(f"rank {world.rank}")]
    return [*found, world.first(lambda: 40 + world.rank), world.together(lambda: world.rank)]


def test_numbers_and_values_of_all_ranks(tmp_path: Path) -> None:
    ended = on_two_ranks(numbers, tmp_path)
    assert [one.value for one in ended] == [[3.0, 1.0, ["rank 0", "rank 1"], 40, rank] for rank in (0, 1)]


def one_fails(world: World) -> None:
    fails_on(world, 1, ServerError("the server is gone", code="E-SRV-01", do="start it"))


def test_all_fail_with_the_code_of_the_one_that_failed(tmp_path: Path) -> None:
    there, here = on_two_ranks(one_fails, tmp_path)
    assert codes([there, here]) == ["E-SRV-01"] * 2
    assert (there.value["exit_code"], here.value["exit_code"]) == (11, 6)
    assert there.value["what"] == "process 1: the server is gone" and there.value["do"] == "start it"


def one_fails_alone(world: World) -> None:
    if world.rank == 1:
        raise RewardError("it raised", code="E-RWD-01")
    world.total(1.0)


def test_an_error_outside_of_what_is_done_together_is_told_too(tmp_path: Path) -> None:
    assert codes(on_two_ranks(one_fails_alone, tmp_path)) == ["E-RWD-01"] * 2


def one_has_a_bug(world: World) -> None:
    if world.rank == 1:
        raise InternalError("KeyError: 'x'")
    world.gather(1)


def test_so_is_a_bug(tmp_path: Path) -> None:
    assert codes(on_two_ranks(one_has_a_bug, tmp_path)) == ["E-INT-01"] * 2


def one_is_killed(world: World) -> None:
    if world.rank == 1:
        killed()
    world.total(1.0)


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    here, there = on_two_ranks(one_is_killed, tmp_path)
    assert here.value["code"] == "E-PEER-01" and here.value["exit_code"] == 11 and there.code == -9


def the_first_is_killed(world: World) -> None:
    # Both are there.
    world.total(1.0)
    if world.rank == 0:
        killed()
    world.total(1.0)


def test_so_does_the_one_that_keeps_the_store(tmp_path: Path) -> None:
    there, here = on_two_ranks(the_first_is_killed, tmp_path)
    assert here.value["code"] == "E-PEER-01" and there.code == -9


def one_stands_still(world: World) -> None:
    if world.rank == 1:
        time.sleep(5)
    world.total(1.0)


def test_a_rank_that_stands_still_is_waited_for_as_long_as_the_config_says(tmp_path: Path) -> None:
    here, _ = on_two_ranks(one_stands_still, tmp_path, waits_s=2.0)
    assert here.value["code"] == "E-PEER-02"


def one_fails_while_the_other_waits(world: World) -> None:
    world.grace_s = 1.0
    began = time.monotonic()
    try:
        fails_on(world, 0, RewardError("it raised", code="E-RWD-01")) if world.rank == 0 else world.together(
            lambda: time.sleep(4)
        )
    except RewardError:
        assert time.monotonic() - began < 3, "it waited for one that is busy elsewhere"
        raise


def test_a_rank_that_failed_leaves_before_a_busy_one_hears_of_it(tmp_path: Path) -> None:
    assert codes(on_two_ranks(one_fails_while_the_other_waits, tmp_path)) == ["E-RWD-01"] * 2


def stopped_and_failed(world: World) -> None:
    def act() -> None:
        raise Interrupted("stopped", signal_number=15) if world.rank == 0 else RewardError("it raised", code="E-RWD-01")

    world.together(act)


def test_a_fault_weighs_more_than_a_signal(tmp_path: Path) -> None:
    """A launcher that sees one process fail stops the others."""
    assert codes(on_two_ranks(stopped_and_failed, tmp_path)) == ["E-RWD-01"] * 2


def test_alone_there_is_nobody_to_ask() -> None:
    world = World()
    assert (world.total(3.0), world.largest(2.0), world.gather("a"), world.first(lambda: 7)) == (3.0, 2.0, ["a"], 7)
    with pytest.raises(KeyError), world.telling():
        world.together(lambda: {}["x"])
