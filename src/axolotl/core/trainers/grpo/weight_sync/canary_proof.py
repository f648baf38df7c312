"""Proof that what is pushed reaches what generates, with a policy that cannot be mistaken for another: the canary.

    prove    base model: server and trainer agree, and how nearly is the noise of everything that follows
             canary: pushed like any version; the server must score as the trainer does, and not as the base model
             drawn: tokens that the server samples under the canary must come with the canary's log-probs
    repeat   the same against the numbers of the first time, for a server that was restarted

Cost: one push more before step 1 and a few dozen tokens on both sides. With an adapter that is nothing. With full
weights it is all of them once more, on disk until the first version is served; never in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from axolotl.core.trainers.grpo.weight_sync.agreement import DISTINCT, distance
from axolotl.core.trainers.grpo.weight_sync.canary import NUM_SIZES, canary
from axolotl.core.trainers.grpo.weight_sync.delivery import Delivered, Delivery
from axolotl.core.trainers.grpo.weight_sync.probe import PolicyProbe, ServerProbe
from axolotl.core.trainers.grpo.weight_sync.verdict import Expected, name_of, require
from axolotl.errors import SyncError
from axolotl.failpoints import point
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import CANARY_VERSION

SMALLEST_NOISE = 1e-6


class CanaryProof:
    """`prove` on the main thread; `repeat`, which is HTTP only, on any.

    noise: how far two right sides are apart, in nats, as measured with the base model and the canary. base: the base
    model's log-probs, the trainer's where it has that model. served_base: the server's.
    """

    def __init__(
        self, delivery: Delivery, client: ServerClient, probe: PolicyProbe, server: ServerProbe, tolerance: float
    ) -> None:
        self.noise = SMALLEST_NOISE
        self.base: torch.Tensor | None = None
        self.served_base: torch.Tensor | None = None
        self._delivery = delivery
        self._client = client
        self._probe = probe
        self._server = server
        self._tolerance = tolerance
        self._canary: Expected | None = None
        self._digest = ""
        self._proven_on: str | None = None

    @property
    def is_proven(self) -> bool:
        """For the process that serves now."""
        return self._proven_on == self._client.info.instance_id

    def prove(self, others: Mapping[str, torch.Tensor]) -> None:
        """Push a canary and hold the server to it. others: log-probs of what it may serve now, beside the base model.

        Raises:
            SyncError: `E-SYN-11` it computes with other weights; the delivery's own codes.
        """
        if self.base is None:
            self._measure_base()
        assert self.base is not None
        logps, delivered = self._deliver({name_of(0): self.base, **others})
        canary = Expected(CANARY_VERSION, self._probe.probe.tokens, logps, {name_of(0): self.base, **others})
        point("srv.canary")
        self._hold_to(canary)
        self._canary, self._digest = canary, delivered.digest

    def repeat(self) -> None:
        """For a server that knows nothing of this run yet. Full weights are not kept for it: there the base model is
        compared, and when it is another process the next push begins with a canary again."""
        if self._canary is None:
            return
        assert self.served_base is not None
        if self._delivery.has_adapter:
            self._client.set_adapter(CANARY_VERSION, self._digest)
            self._hold_to(self._canary)
        else:
            self._require(Expected(0, self._canary.tokens, self.served_base, {}), self._server.score(0))

    def _measure_base(self) -> None:
        served = self.served_base = self._server.score(0)
        if self._delivery.has_adapter:
            own = self.base = self._probe.base()
            self._require(Expected(0, self._probe.probe.tokens, own, {}), served)
        else:
            # The trainer has the base model only as long as nothing is trained: a resumed run may be anywhere.
            own, self.base = self._probe.current(), served
        gap = distance(served, own)
        if gap <= self._tolerance:
            self.noise = max(self.noise, gap)

    def _deliver(self, others: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Delivered]:
        """Grow the canary until it cannot be mistaken for any of `others`, and have the server load it.

        Flipped signs have a largest effect; a canary that stays smaller than wanted is held to a smaller gap instead.
        """
        moved = 0.0
        for size in range(NUM_SIZES):
            with canary(self._probe.policy(), size):
                logps = self._probe.current()
                moved = min(distance(logps, other) for other in others.values())
                is_last = size == NUM_SIZES - 1
                if moved >= DISTINCT * (max(self.noise, SMALLEST_NOISE) if is_last else self._tolerance):
                    return logps, self._delivery.deliver(CANARY_VERSION)
        raise SyncError(
            "what is trained has no effect in the trainer",
            code="E-SYN-11",
            why=f"random weights move log-probs by {moved:.2g} nats; {DISTINCT * self._tolerance:g} would be seen",
            do="look at lora_target_modules: none of them may take part in the model's output",
        )

    def _hold_to(self, canary: Expected) -> None:
        served = self._server.score(CANARY_VERSION)
        moved = min(distance(canary.logps, other) for other in canary.others.values())
        self._require(canary, served, tolerance=min(self._tolerance, moved / DISTINCT))
        self.noise = max(self.noise, distance(served, canary.logps))
        tokens, drawn = self._server.draw(CANARY_VERSION)
        others = {name_of(0): self._server.score(0, tokens)} if self._delivery.has_adapter else {}
        scored = self._server.score(CANARY_VERSION, tokens)
        self._require(Expected(CANARY_VERSION, tokens, scored, others, is_drawn=True), drawn)
        self._proven_on = self._client.info.instance_id

    def _require(self, expected: Expected, served: torch.Tensor, tolerance: float | None = None) -> None:
        limit = self._tolerance if tolerance is None else tolerance
        require(expected, served, tolerance=limit, noise=self.noise)
