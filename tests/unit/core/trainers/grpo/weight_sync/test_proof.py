"""The order of things, with a delivery and a server of a few lines each; the integration tests have real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from axolotl.core.trainers.grpo.weight_sync.delivery import Delivered
from axolotl.core.trainers.grpo.weight_sync.probe import PolicyProbe, Probe
from axolotl.core.trainers.grpo.weight_sync.proof import ProvenSync
from axolotl.errors import SyncError

TOKENS = (4, 5)


@dataclass
class World:
    """A policy that is one number, its log-prob of every token; `served` is what the server has under each version."""

    policy: float = -1.0
    served: dict[int, float] = field(default_factory=lambda: {0: -1.0})
    calls: list[str] = field(default_factory=list)
    on_recovered: Callable[[], None] | None = None
    has_adapter: bool = False
    temperature: float = 0.7
    probe: Probe = field(default=Probe((1, 2), TOKENS))

    def deliver(self, version: int) -> Delivered:
        self.calls.append(f"deliver {version}")
        self.served[version] = self.policy
        return Delivered(save_s=0.25, load_s=0.5)

    def score(self, prompts: Any, tokens: Any, temperature: float, version: int) -> list[list[float]]:
        assert (prompts, tokens, temperature) == ([(1, 2)], [TOKENS], 0.7)
        self.calls.append(f"score {version}")
        return [[self.served[version]] * len(TOKENS)]

    def current(self) -> torch.Tensor:
        self.calls.append("forward")
        return torch.full((len(TOKENS),), self.policy, dtype=torch.float64)


def make(world: World, *, check_interval: int = 1) -> ProvenSync:
    anything = cast(Any, world)
    return ProvenSync(world, anything, cast(PolicyProbe, anything), tolerance=1e-3, check_interval=check_interval)


def test_a_push_is_delivered_then_checked_then_believed() -> None:
    world = World()
    sync = make(world)
    assert sync.version == 0
    sync.push(1)
    assert world.calls == ["score 0", "deliver 1", "forward", "score 1"]
    assert sync.version == 1
    assert {name: sync.metrics[name] for name in ("sync/save", "sync/load", "sync/logp_gap", "sync/logp_distance")} == {
        "sync/save": 0.25,
        "sync/load": 0.5,
        "sync/logp_gap": 0.0,
        "sync/logp_distance": 0.0,
    }
    assert sync.metrics["sync/check"] >= 0 and "sync/canary" in sync.metrics
    world.policy = -1.5
    sync.push(2)
    assert sync.metrics["sync/logp_distance"] == 0.5 and "sync/canary" not in sync.metrics


@pytest.mark.parametrize(("wrong", "named"), [(-1.0, "the base model"), (-1.2, "version 1")])
def test_another_policy_is_refused_and_the_version_not_believed(wrong: float, named: str) -> None:
    world = World()
    sync = make(world)
    world.policy = -1.2
    sync.push(1)
    world.policy = -1.5

    def deliver(version: int) -> Delivered:
        world.served[version] = wrong
        return Delivered(0.0, 0.0)

    world.deliver = deliver  # type: ignore[method-assign]
    with pytest.raises(SyncError) as caught:
        sync.push(2)
    error = caught.value
    assert (error.code, error.exit_code) == ("E-SYN-11", 7)
    assert any(name in error.why for name in named.split("|"))
    assert (
        len(error.details) == len(TOKENS) and f"token 4: server {wrong:.4f}, policy version 2 -1.5" in error.details[0]
    )
    assert sync.version == 1


def test_a_stale_version_is_refused_though_the_tolerance_would_let_it_pass() -> None:
    world = World()
    sync = make(world)
    sync.push(1)
    world.policy = -1.0002

    def deliver(version: int) -> Delivered:
        world.served[version] = -1.0
        return Delivered(0.0, 0.0)

    world.deliver = deliver  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="does not generate with policy version 2"):
        sync.push(2)


def test_the_interval_counts_pushes_and_zero_checks_nothing() -> None:
    world = World()
    sync = make(world, check_interval=2)
    for version in range(1, 5):
        sync.push(version)
    assert [call for call in world.calls if call.startswith("score")] == ["score 0", "score 1", "score 3"]
    world = World()
    sync = make(world, check_interval=0)
    sync.push(1)
    assert world.calls == ["score 0", "deliver 1"] and sync.metrics["sync/check"] == 0


def test_after_a_recovery_the_served_version_is_scored_without_the_model() -> None:
    world = World()
    sync = make(world, check_interval=5)
    sync.push(1)
    world.policy = -1.5
    sync.push(2)
    world.calls.clear()
    assert world.on_recovered is not None
    world.on_recovered()
    assert world.calls == ["score 2"]
    world.served[2] = -1.0
    with pytest.raises(SyncError, match="policy version 2"):
        world.on_recovered()
    sync.close()
    assert world.on_recovered is None


def test_before_the_first_push_a_recovery_has_nothing_to_check() -> None:
    world = World()
    make(world).recheck()
    assert world.calls == []
