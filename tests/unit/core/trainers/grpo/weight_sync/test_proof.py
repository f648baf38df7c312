"""The order of things, and what is believed when; the integration tests have a real model and a real server."""

from __future__ import annotations

import pytest

from axolotl.errors import SyncError
from axolotl.serving.wire import CANARY_VERSION
from tests.support.sync_world import BASE, TOKENS, World

CANARY = str(CANARY_VERSION)


def without_canary(world: World) -> list[str]:
    return [call for call in world.calls if not call.endswith(CANARY)]


def test_a_push_is_delivered_then_checked_then_believed() -> None:
    world = World()
    sync = world.sync()
    assert sync.version == 0
    sync.push(1)
    assert world.calls[:2] == ["score 0", f"deliver {CANARY}"] and world.calls[-2:] == ["deliver 1", "score 1"]
    assert sync.version == 1
    assert {name: sync.metrics[name] for name in ("sync/save", "sync/load", "sync/logp_gap", "sync/logp_distance")} == {
        "sync/save": 0.25,
        "sync/load": 0.5,
        "sync/logp_gap": 0.0,
        "sync/logp_distance": 0.0,
    }
    assert sync.metrics["sync/check"] >= 0 and "sync/canary" in sync.metrics
    world.become(-1.5)
    world.calls.clear()
    sync.push(2)
    assert world.calls == ["deliver 2", "score 2", "draw 2"]
    assert sync.metrics["sync/logp_distance"] == 0.5 and "sync/canary" not in sync.metrics


@pytest.mark.parametrize("has_adapter", [True, False])
@pytest.mark.parametrize(("wrong", "named"), [(BASE, "the base model"), (-1.2, "version 1")])
def test_another_policy_is_refused_and_the_version_not_believed(wrong: float, named: str, has_adapter: bool) -> None:
    world = World(has_adapter=has_adapter)
    sync = world.sync()
    world.become(-1.2)
    sync.push(1)
    world.become(-1.5)
    world.arrives = lambda version, value: wrong
    with pytest.raises(SyncError) as caught:
        sync.push(2)
    error = caught.value
    assert (error.code, error.exit_code) == ("E-SYN-11", 7)
    assert named in error.why
    assert (
        len(error.details) == len(TOKENS) and f"token 4: server {wrong:.4f}, policy version 2 -1.5" in error.details[0]
    )
    assert sync.version == 1


def test_a_stale_version_is_refused_though_the_tolerance_would_let_it_pass() -> None:
    world = World()
    sync = world.sync()
    sync.push(1)
    world.become(-1.0002)
    world.arrives = lambda version, value: BASE
    with pytest.raises(SyncError, match="does not generate with policy version 2"):
        sync.push(2)


# One optimizer step must change the server's log-probs


@pytest.mark.parametrize("has_adapter", [True, False])
def test_a_server_that_stands_still_is_caught_though_noise_hides_which_policy_it_has(has_adapter: bool) -> None:
    """Half precision: right sides are 0.01 apart, the step moved the policy by 0.03."""
    world = World(has_adapter=has_adapter, noise=0.01)
    sync = world.sync(tolerance=0.1)
    sync.push(1)
    world.become(-1.03)
    world.arrives = lambda version, value: BASE + 0.02  # what the noise of an even version makes that of version 1
    with pytest.raises(SyncError, match="policy version 2 changed nothing in the server") as caught:
        sync.push(2)
    assert caught.value.exit_code == 7
    assert caught.value.why == "the trainer's log-probs moved by 0.03 nats, the server's by 0"
    assert "policy version 1" in caught.value.what or "the base model" in caught.value.what
    assert sync.version == 1


def test_steps_too_small_to_be_seen_are_let_pass_and_add_up() -> None:
    world = World(noise=0.01)
    sync = world.sync(tolerance=0.1)
    sync.push(1)
    world.arrives = lambda version, value: BASE + (0.0 if version % 2 else 0.02)
    for version, value in ((2, -1.004), (3, -1.008)):
        world.become(value)
        sync.push(version)
    world.become(-1.012)
    with pytest.raises(SyncError, match="it still computes what it did with policy version 1"):
        sync.push(4)


def test_a_step_that_changes_nothing_is_not_punished() -> None:
    """A learning rate of 0, as in the first step of a warm-up."""
    world = World()
    sync = world.sync()
    for version in (1, 2, 3):
        sync.push(version)
    assert sync.version == 3


def test_a_server_that_follows_is_never_refused_for_its_noise() -> None:
    world = World(noise=0.01)
    sync = world.sync(tolerance=0.1)
    for version in range(1, 30):
        sync.push(version)
        world.become(BASE - 0.004 * version)
    assert sync.metrics["sync/logp_noise"] == pytest.approx(0.01)


@pytest.mark.parametrize("has_adapter", [True, False])
def test_the_first_full_weights_equal_the_base_model_but_for_the_noise(has_adapter: bool) -> None:
    """Nearer to the server's base model than to the trainer's policy, since it is that model."""
    world = World(has_adapter=has_adapter, noise=0.0)
    sync = world.sync(tolerance=0.1)
    world.become(BASE - 0.02)  # the trainer's numbers of the same weights
    world.arrives = lambda version, value: BASE if version == 1 else value
    world.base = world.current  # type: ignore[method-assign]
    sync.push(1)
    assert sync.metrics["sync/logp_gap"] == pytest.approx(0.02)


# A server that scores honestly, and samples with something else


@pytest.mark.parametrize("has_adapter", [True, False])
def test_tokens_that_were_drawn_with_another_policy_are_caught(has_adapter: bool) -> None:
    world = World(has_adapter=has_adapter)
    world.draws_with = lambda version: world.served[version] if version == CANARY_VERSION else BASE
    sync = world.sync()
    sync.push(1)
    world.become(-1.2)
    with pytest.raises(SyncError, match="its log-probs of the 3 tokens that it sampled") as caught:
        sync.push(2)
    assert (caught.value.code, caught.value.exit_code) == ("E-SYN-11", 7)
    assert caught.value.details[0].startswith("log-prob of token 6: server -1.0000, policy version 2 -1.2000")
    assert sync.version == 1


def test_tokens_are_drawn_when_the_policy_has_left_the_base_model_and_at_every_tenth_comparison_after_that() -> None:
    world = World(has_adapter=True)
    sync = world.sync(check_interval=2)
    for version in range(1, 46):
        world.become(BASE - 0.1 * max(version - 2, 0))
        sync.push(version)
    # Compared are the odd versions, and the first is the base model.
    assert [call for call in without_canary(world) if call.startswith("draw")] == ["draw 3", "draw 23", "draw 43"]


def test_a_server_that_came_back_draws_at_once() -> None:
    world = World(has_adapter=True)
    sync = world.sync()
    world.become(-1.2)
    sync.push(1)
    sync.push(2)
    sync.recheck()
    sync.push(3)
    assert [call for call in without_canary(world) if call.startswith("draw")] == ["draw 1", "draw 3"]


@pytest.mark.parametrize("num_drawn", [1, 2])
def test_a_completion_that_ended_early_averages_over_less(num_drawn: int) -> None:
    """Two tokens are scored, so that one that was drawn may be twice as far away; two may not."""
    world = World(num_drawn=num_drawn)
    world.draws_with = lambda version: world.served[version] + (0.0 if version == CANARY_VERSION else 0.15)
    sync = world.sync(tolerance=0.1)
    sync.push(1)
    world.become(-1.2)
    if num_drawn == 1:
        sync.push(2)
        assert sync.metrics["sync/drawn_gap"] == pytest.approx(0.15)
    else:
        with pytest.raises(SyncError, match="2 tokens that it sampled") as caught:
            sync.push(2)
        assert "0.15" in caught.value.why and "0.1" in caught.value.why.replace("0.15", "")


# The interval


def test_the_interval_counts_pushes() -> None:
    world = World()
    sync = world.sync(check_interval=2)
    for version in range(1, 5):
        sync.push(version)
    scores = [call for call in without_canary(world) if call.startswith("score")]
    assert scores == ["score 0", "score 1", "score 3"]


@pytest.mark.parametrize("has_adapter", [True, False])
def test_zero_ends_the_repeated_check_and_nothing_else(has_adapter: bool) -> None:
    world = World(has_adapter=has_adapter)
    sync = world.sync(check_interval=0)
    sync.push(1)
    assert f"deliver {CANARY}" in world.calls and f"score {CANARY}" in world.calls
    assert [call for call in without_canary(world) if call != "score 0"] == ["deliver 1"]
    assert sync.metrics["sync/check"] == 0 and "sync/logp_gap" not in sync.metrics


@pytest.mark.parametrize("has_adapter", [True, False])
def test_with_zero_the_canary_still_catches_what_does_not_arrive(has_adapter: bool) -> None:
    world = World(has_adapter=has_adapter)
    world.arrives = lambda version, value: BASE
    with pytest.raises(SyncError, match="does not generate with the canary"):
        world.sync(check_interval=0).push(1)


def test_with_zero_a_restarted_server_is_still_held_to_the_canary() -> None:
    world = World(has_adapter=True)
    world.sync(check_interval=0).push(1)
    world.arrives = lambda version, value: BASE
    with pytest.raises(SyncError, match="does not generate with the canary"):
        world.restart()


# After a recovery


def test_a_restarted_server_is_held_to_canary_and_served_version_without_the_model() -> None:
    world = World(has_adapter=True)
    sync = world.sync(check_interval=5)
    sync.push(1)
    world.become(-1.5)
    sync.push(2)
    world.calls.clear()
    world.current = lambda: pytest.fail("the model is the main thread's")  # type: ignore[method-assign]
    world.restart()
    assert world.calls[:2] == [f"set {CANARY}", f"score {CANARY}"] and world.calls[-1] == "score 2"
    sync.close()
    assert world.on_recovered is None and world.on_claimed_again is None


@pytest.mark.parametrize(("lost", "named"), [(CANARY_VERSION, "the canary"), (2, "policy version 2")])
def test_a_restarted_server_that_does_not_take_what_is_pushed_is_caught(lost: int, named: str) -> None:
    world = World(has_adapter=True)
    sync = world.sync()
    sync.push(1)
    world.become(-1.5)
    sync.push(2)
    world.arrives = lambda version, value: BASE if version == lost else value
    with pytest.raises(SyncError, match=f"does not generate with {named}"):
        world.restart()


def test_after_a_restart_full_weights_begin_with_a_canary_again() -> None:
    world = World()
    sync = world.sync()
    sync.push(1)
    world.become(-1.5)
    sync.push(2)
    world.calls.clear()
    world.restart()
    assert world.calls == ["score 0", "score 2"]
    world.become(-1.6)
    sync.push(3)
    assert f"deliver {CANARY}" in world.calls and world.calls[-3:] == ["deliver 3", "score 3", "draw 3"]
    world.calls.clear()
    sync.push(4)
    assert world.calls == ["deliver 4", "score 4"]


def test_a_process_that_nobody_spoke_of_begins_with_a_canary_too() -> None:
    """A delivery may have the server claimed again by itself, in the middle of a push."""
    world = World()
    sync = world.sync()
    sync.push(1)
    world.info.instance_id = "instance-2"
    sync.push(2)
    assert "sync/canary" in sync.metrics
    sync.push(3)
    assert "sync/canary" not in sync.metrics


def test_a_restart_with_another_base_model_is_caught() -> None:
    world = World()
    sync = world.sync()
    sync.push(1)
    world.served = {0: BASE}
    assert world.on_claimed_again is not None
    world.served[0] = -1.1
    with pytest.raises(SyncError, match="does not generate with the base model"):
        world.on_claimed_again()


def test_a_restart_between_canary_and_first_version_has_nothing_to_check_it_against() -> None:
    world = World()
    sync = world.sync()
    sync.push(1)
    world.restart()
    deliver, restarted = world.deliver, []

    def restart_first(version: int) -> object:
        if version == 2 and not restarted:
            restarted.append(version)
            world.restart()
        return deliver(version)

    world.deliver = restart_first  # type: ignore[method-assign, assignment]
    world.become(-1.5)
    sync.push(2)
    assert sync.version == 2 and restarted == [2]


@pytest.mark.parametrize("has_adapter", [True, False])
def test_before_the_first_push_a_recovery_has_nothing_to_check(has_adapter: bool) -> None:
    world = World(has_adapter=has_adapter)
    world.sync()
    world.restart()
    assert world.calls == []
