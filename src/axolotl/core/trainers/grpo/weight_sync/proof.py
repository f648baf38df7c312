"""Proof that what the server generates with is the policy in training, before an optimizer step uses it.

before the first push   canary_proof.py: weights that nobody could mistake go the whole way
every push              the server confirms version, digest and number of modules (the delivery's own check)
after a push            in `settle`, while the server generates: one small forward here, a score of the same tokens
                        there. Agreement, nearer to this policy than to the base model or to the version before, and
                        moved when the trainer's have moved. Now and then the server samples a few tokens as well, whose
                        log-probs must be the trainer's: scoring and sampling may go different ways in an engine
after a recovery        canary and last push again, against the numbers of the first time; no model is needed
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from axolotl.core.trainers.grpo.weight_sync.agreement import distance, has_moved
from axolotl.core.trainers.grpo.weight_sync.canary_proof import CanaryProof
from axolotl.core.trainers.grpo.weight_sync.delivery import Delivery
from axolotl.core.trainers.grpo.weight_sync.probe import PolicyProbe, ServerProbe
from axolotl.core.trainers.grpo.weight_sync.verdict import Expected, name_of, require, require_moved
from axolotl.failpoints import point
from axolotl.serving.client import ServerClient

DRAW_EVERY = 10
"""Comparisons from one that the server samples for to the next. Sampling waits behind the completions of a whole step
where an engine does one request after the other, and what goes wrong with it goes on going wrong."""


class ProvenSync:
    """A `WeightSync` that believes nothing. Main thread, but for what the client calls after a recovery, from any.

    Args:
        tolerance: mean difference in nats, see `agreement.tolerance`.
        check_interval: compare log-probs after every so many pushes, the first included; 0 never. The canary and the
            server's confirmations do not depend on it.
    """

    def __init__(
        self, delivery: Delivery, client: ServerClient, probe: PolicyProbe, *, tolerance: float, check_interval: int
    ) -> None:
        self._delivery = delivery
        self._client = client
        self._probe = probe
        self._tolerance = tolerance
        self._check_interval = check_interval
        self._server = ServerProbe(client, probe.probe, probe.temperature)
        self._canary = CanaryProof(delivery, client, probe, self._server, tolerance)
        self._num_pushes = 0
        # Comparisons until the server is to sample again.
        self._until_draw = 0
        self._version = 0
        # The version before the one that was begun and not settled.
        self._unsettled: int | None = None
        self._current: Expected | None = None
        self._before: list[tuple[Expected, torch.Tensor]] = []
        self._metrics: dict[str, float] = {}
        client.on_claimed_again = self._canary.repeat
        client.on_recovered = self.recheck

    @property
    def keeps_versions(self) -> bool:
        return self._delivery.has_adapter

    @property
    def version(self) -> int:
        return self._version

    @property
    def metrics(self) -> Mapping[str, float]:
        """Seconds of the last push, and what its check found.

        Training waits for `sync/save` and `sync/load`; the server generates while `sync/check` runs.
        """
        return self._metrics

    def push(self, version: int) -> None:
        """`begin` and `settle`."""
        self.begin(version)
        self.settle()

    def begin(self, version: int) -> None:
        """Deliver the current weights as `version`; requests for it may be made from now on.

        Raises:
            SyncError: they did not arrive (the delivery's own codes), or `E-SYN-11` the canary was not believed.
        """
        self._unsettled = None
        self._metrics = {}
        # A recovery sends the canary as well, and what was pushed before: neither may change under it.
        with self._client.undisturbed():
            if not self._canary.is_proven:
                with self._timed("sync/canary"):
                    self._prove_path()
            delivered = self._delivery.deliver(version)
        self._metrics |= {"sync/save": delivered.save_s, "sync/load": delivered.load_s, "sync/check": 0.0}
        self._unsettled = self._version
        self._version = version
        point("sync.after_ack")

    def settle(self) -> None:
        """Check that the server generates with what `begin` delivered. Raises `SyncError` `E-SYN-11` if it does not."""
        if self._unsettled is None:
            return
        believed, self._unsettled = self._unsettled, None
        if self._check_interval:
            try:
                with self._timed("sync/check"):
                    self._check(self._version)
            except BaseException:
                self._version = believed
                raise
        self._num_pushes += 1

    def recheck(self) -> None:
        """Score the served version again and compare with what the trainer said of it. HTTP only.

        Between `begin` and `settle` nothing is known of the newest version; `settle` finds out.
        """
        self._until_draw = 0
        if self._current is not None and self._version == self._current.version:
            self._require(self._current, self._server.score(self._current.version))

    def close(self) -> None:
        """What was published stays: the server may still serve the last version."""
        self._client.on_claimed_again = self._client.on_recovered = None

    def _prove_path(self) -> None:
        others = {} if self._current is None else {self._current.name: self._current.logps}
        if not self._delivery.has_adapter:
            # The canary replaces the version before, which nobody can score from then on.
            self._current = None
        self._canary.prove(others)
        base, served = self._canary.base, self._canary.served_base
        assert base is not None and served is not None
        if self._delivery.has_adapter:
            self._before = [(Expected(0, self._probe.probe.tokens, base, {}), served)]

    def _check(self, version: int) -> None:
        """The trainer's side is computed at every push, so that a recovery and the next check know it exactly."""
        base = self._canary.base
        assert base is not None
        others = {name_of(0): base}
        if self._current is not None:
            others[self._current.name] = self._current.logps
        pushed = self._current = Expected(version, self._probe.probe.tokens, self._probe.current(), others)
        self._metrics |= {
            "sync/logp_distance": distance(pushed.logps, base),
            "sync/logp_noise": self._canary.noise,
        }
        if self._num_pushes % self._check_interval == 0:
            served = self._server.score(version)
            self._require(pushed, served)
            self._require_moved(pushed, served)
            self._metrics["sync/logp_gap"] = distance(served, pushed.logps)
            self._until_draw -= 1
            # Until it has left the base model, there is nothing to be told apart.
            if self._until_draw < 0 and has_moved(pushed.logps, base, noise=self._canary.noise):
                self._check_drawn(version)

    def _check_drawn(self, version: int) -> None:
        """Raise `E-SYN-11` when the server samples with other weights than it scores with."""
        tokens, drawn = self._server.draw(version)
        others = {name_of(0): self._probe.base(tokens)} if self._delivery.has_adapter else {}
        expected = Expected(version, tokens, self._probe.current(tokens), others, is_drawn=True)
        # A completion that ended early has fewer tokens for their differences to average out.
        share = len(self._probe.probe.tokens) / max(len(tokens), 1)
        require(expected, drawn, tolerance=self._tolerance * share, noise=self._canary.noise * share)
        self._metrics["sync/drawn_gap"] = distance(drawn, expected.logps)
        self._until_draw = DRAW_EVERY - 1

    def _require(self, pushed: Expected, served: torch.Tensor) -> None:
        require(pushed, served, tolerance=self._tolerance, noise=self._canary.noise)

    def _require_moved(self, pushed: Expected, served: torch.Tensor) -> None:
        """Raise `E-SYN-11` when the policy has clearly left a version that the server has not.

        Remembered are the last version and the oldest that was not clearly left yet: small steps add up until they must
        be seen.
        """
        noise = self._canary.noise
        for before, served_before in self._before:
            require_moved(pushed, served, before, served_before, noise=noise)
        near = [item for item in self._before if not has_moved(pushed.logps, item[0].logps, noise=noise)]
        self._before = [*near[:1], (pushed, served)]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._metrics[name] = time.perf_counter() - started
