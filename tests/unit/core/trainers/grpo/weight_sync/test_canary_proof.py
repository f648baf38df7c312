from __future__ import annotations

import pytest

from axolotl.core.trainers.grpo.weight_sync import canary_proof
from axolotl.core.trainers.grpo.weight_sync.canary import NUM_SIZES
from axolotl.errors import SyncError
from axolotl.serving.wire import CANARY_VERSION
from tests.support.sync_world import BASE, World

CANARY = str(CANARY_VERSION)


def refusal(world: World, tolerance: float = 1e-3) -> SyncError:
    """What the first push ends with; the version itself is not delivered."""
    with pytest.raises(SyncError) as caught:
        world.sync(tolerance=tolerance).push(1)
    assert (caught.value.code, caught.value.exit_code) == ("E-SYN-11", 7)
    assert "deliver 1" not in world.calls
    return caught.value


@pytest.mark.parametrize("has_adapter", [True, False])
def test_the_whole_way_is_tried_before_the_first_version(has_adapter: bool) -> None:
    world = World(has_adapter=has_adapter)
    world.sync().push(1)
    drawn = [f"draw {CANARY}", *(["score 0"] if has_adapter else []), f"score {CANARY}"]
    assert world.calls == ["score 0", f"deliver {CANARY}", f"score {CANARY}", *drawn, "deliver 1", "score 1"]
    assert world.weight.item() == BASE


@pytest.mark.parametrize("has_adapter", [True, False])
@pytest.mark.parametrize("arrived", [BASE, 0.0, 0.9])
def test_weights_that_are_not_those_of_the_canary_are_caught(arrived: float, has_adapter: bool) -> None:
    """The base model, zeros, and others that are nearer to the canary than to the base model."""
    world = World(has_adapter=has_adapter)
    world.arrives = lambda version, value: arrived
    error = refusal(world)
    assert "does not generate with the canary" in error.what


@pytest.mark.parametrize("has_adapter", [True, False])
def test_tokens_drawn_with_other_weights_than_are_scored_are_caught(has_adapter: bool) -> None:
    world = World(has_adapter=has_adapter)
    world.draws_with = lambda version: BASE
    error = refusal(world)
    assert "does not generate with the canary" in error.what
    assert error.details[0].startswith("log-prob of token 6: server -1.0000, the canary 1.0000")


def test_another_base_model_is_named_before_anything_is_pushed() -> None:
    world = World(has_adapter=True)
    world.served[0] = -1.3
    error = refusal(world)
    assert "does not generate with the base model" in error.what
    assert world.calls == ["score 0"]


def test_a_canary_that_stays_small_is_held_to_a_smaller_gap() -> None:
    """Flipped, the only weight moves the log-probs by 0.2; the tolerance alone would let the base model pass."""

    def small() -> World:
        world = World()
        world.become(-0.1)
        world.served[0] = -0.1
        return world

    small().sync(tolerance=0.5).push(1)
    world = small()
    world.arrives = lambda version, value: 0.07
    error = refusal(world, tolerance=0.5)
    assert "0.03 nats from the policy that was pushed, tolerance is 0.02" in error.why


def test_a_model_that_random_weights_do_not_change_cannot_be_proven() -> None:
    world = World()
    world.become(0.0)
    world.served[0] = 0.0
    error = refusal(world)
    assert "no effect in the trainer" in error.what


def test_the_canary_grows_until_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    smallest = canary_proof.canary

    def seen(model: World, size: int) -> object:
        sizes.append(size)
        return smallest(model, size)

    monkeypatch.setattr(canary_proof, "canary", seen)
    World().sync(tolerance=0.1).push(1)  # 2 nats are at least 10 tolerances
    assert sizes == [0]
    sizes.clear()
    World().sync(tolerance=0.3).push(1)  # 2 nats are not
    assert sizes == list(range(NUM_SIZES))


def test_the_noise_is_what_base_model_and_canary_were_apart() -> None:
    for noise in (0.0, 0.02):
        world = World(has_adapter=True, noise=noise)
        sync = world.sync(tolerance=0.1)
        sync.push(1)
        assert sync.metrics["sync/logp_noise"] == pytest.approx(noise, abs=1e-6)


def test_a_resumed_policy_is_not_mistaken_for_noise() -> None:
    world = World()
    world.become(-1.5)
    sync = world.sync()
    sync.push(8)
    assert sync.metrics["sync/logp_noise"] == pytest.approx(1e-6) and sync.metrics["sync/logp_distance"] == 0.5
