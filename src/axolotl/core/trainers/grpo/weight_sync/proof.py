"""Proof that what the server generates with is the policy in training, before an optimizer step uses it.

before the first push   canary: an adapter with random B on both sides; both must agree, and differ from the base
after a push            one small forward here, a score of the same tokens there: agreement, and nearer to this
                        policy than to the base model or to the version before
after a recovery        the same score against the numbers of the last push; no model is needed
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from axolotl.core.trainers.grpo.weight_sync.agreement import distance, objection
from axolotl.core.trainers.grpo.weight_sync.canary import canary
from axolotl.core.trainers.grpo.weight_sync.delivery import Delivery
from axolotl.core.trainers.grpo.weight_sync.probe import PolicyProbe
from axolotl.errors import SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import CANARY_VERSION

_SMALLEST_NOISE = 1e-6
_FIRST_SCALE = 1e-3
_MAX_DOUBLINGS = 24


@dataclass(frozen=True)
class Pushed:
    """logps: `[scored]` as the trainer has them. others: what a server might compute with instead, by name."""

    version: int
    logps: torch.Tensor
    others: Mapping[str, torch.Tensor]


class ProvenSync:
    """A `WeightSync` that believes nothing. Main thread, but for `recheck`, which the client calls from any.

    Args:
        tolerance: mean difference in nats, see `agreement.tolerance`.
        check_interval: score after every so many pushes, the first included; 0 checks the canary only.
    """

    def __init__(
        self, delivery: Delivery, client: ServerClient, probe: PolicyProbe, *, tolerance: float, check_interval: int
    ) -> None:
        self._delivery = delivery
        self._client = client
        self._probe = probe
        self._tolerance = tolerance
        self._check_interval = check_interval
        self._num_pushes = 0
        self._noise = _SMALLEST_NOISE
        self._base: torch.Tensor | None = None
        self._current: Pushed | None = None
        self._version = 0
        self._metrics: dict[str, float] = {}
        client.on_recovered = self.recheck

    @property
    def version(self) -> int:
        return self._version

    @property
    def metrics(self) -> Mapping[str, float]:
        """Seconds of the last push, all of which training waited for, and what its check found."""
        return self._metrics

    def push(self, version: int) -> None:
        """Deliver the current weights as `version` and check that the server generates with them.

        Raises:
            SyncError: they did not arrive (the delivery's own codes), or `E-SYN-11` the server computes with others.
        """
        self._metrics = {}
        if self._base is None:
            with self._timed("sync/canary"):
                self._base = self._prove_path()
        delivered = self._delivery.deliver(version)
        self._metrics |= {"sync/save": delivered.save_s, "sync/load": delivered.load_s, "sync/check": 0.0}
        if self._check_interval:
            with self._timed("sync/check"):
                self._check(version)
        self._num_pushes += 1
        self._version = version

    def recheck(self) -> None:
        """Score the served version again and compare with what the trainer said of it. HTTP only."""
        if self._current is not None:
            self._require(self._current, self._score(self._current.version))

    def close(self) -> None:
        """What was published stays: the server may still serve the last version."""
        self._client.on_recovered = None

    def _prove_path(self) -> torch.Tensor:
        """The base model's log-probs; where an adapter is sent, only once the server was held to a canary."""
        if not self._delivery.has_adapter:
            return self._score(0)
        base = self._probe.base()
        expected = self._deliver_canary(base)
        served = self._score(CANARY_VERSION)
        self._require(Pushed(CANARY_VERSION, expected, {"the base model": base}), served)
        self._noise = max(self._noise, distance(served, expected))
        return base

    def _deliver_canary(self, base: torch.Tensor) -> torch.Tensor:
        """Grow the canary until it cannot be mistaken for the base model, and have the server load it."""
        moved = 0.0
        for doublings in range(_MAX_DOUBLINGS):
            with canary(self._probe.adapted_policy(), _FIRST_SCALE * 2**doublings):
                expected = self._probe.current()
                moved = distance(expected, base)
                if moved >= 10 * self._tolerance:
                    self._delivery.deliver(CANARY_VERSION)
                    return expected
        raise SyncError(
            "the adapter has no effect in the trainer",
            code="E-SYN-11",
            why=f"random lora_B moves log-probs by {moved:.2g} nats; {10 * self._tolerance:g} would be seen",
            do="look at lora_target_modules: none of them may take part in the model's output",
        )

    def _check(self, version: int) -> None:
        """The trainer's side is computed at every push, so that a recovery and the next check know it exactly."""
        assert self._base is not None
        others = {"the base model": self._base}
        if self._current is not None:
            others[f"version {self._current.version}"] = self._current.logps
        pushed = self._current = Pushed(version, self._probe.current(), others)
        self._metrics["sync/logp_distance"] = distance(pushed.logps, self._base)
        if self._num_pushes % self._check_interval == 0:
            served = self._score(version)
            self._require(pushed, served)
            gap = self._metrics["sync/logp_gap"] = distance(served, pushed.logps)
            if self._num_pushes == 0:
                # Without a canary this is the first thing known about it.
                self._noise = max(self._noise, gap)

    def _require(self, pushed: Pushed, served: torch.Tensor) -> None:
        """Raise `E-SYN-11` unless `served` can only be the policy that was pushed."""
        why = objection(served, pushed.logps, pushed.others, tolerance=self._tolerance, noise=self._noise)
        if why is None:
            return
        raise SyncError(
            f"the server does not generate with {_name(pushed.version)}: "
            f"its log-probs of {len(served)} fixed tokens are another model's",
            code="E-SYN-11",
            why=why,
            do="restart axolotl vllm-serve with this config; if it stays, lora_target_modules may hold what the engine "
            "ignores: try trl.vllm_lora_sync: false",
            details=tuple(self._table(pushed, served)),
        )

    def _table(self, pushed: Pushed, served: torch.Tensor) -> list[str]:
        """The numbers that were compared, one token a line."""
        columns = {"server": served, _name(pushed.version): pushed.logps, **pushed.others}
        return [
            f"log-prob of token {token}: "
            + ", ".join(f"{name} {logps[i].item():.4f}" for name, logps in columns.items())
            for i, token in enumerate(self._probe.probe.tokens)
        ]

    def _score(self, version: int) -> torch.Tensor:
        probe = self._probe.probe
        scores = self._client.score([probe.context], [probe.tokens], self._probe.temperature, version)
        return torch.tensor(scores[0], dtype=torch.float64)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._metrics[name] = time.perf_counter() - started


def _name(version: int) -> str:
    return "the canary" if version == CANARY_VERSION else f"policy version {version}"
