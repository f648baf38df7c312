"""A policy that is one number, the log-prob of every token, and a server of a few lines that is sent it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from axolotl.core.trainers.grpo.weight_sync.delivery import Delivered
from axolotl.core.trainers.grpo.weight_sync.probe import Probe
from axolotl.core.trainers.grpo.weight_sync.proof import ProvenSync
from axolotl.serving.wire import CANARY_VERSION, Completion, GenerateRequest, GenerateResponse, Group

BASE = -1.0
TOKENS = (4, 5)
DRAWN = (6, 7, 8)
PROBE = Probe((1, 2), TOKENS)


class World(nn.Module):
    """Delivery, client and the trainer's side of the probe in one; `calls` has what was asked of it, in order.

    served: what the server has under each version. arrives: what becomes of a value on its way there. draws_with: the
    value that it samples with. noise: its log-probs of odd versions are higher by this, of even ones lower.
    """

    temperature = 0.7
    probe = PROBE

    def __init__(self, *, has_adapter: bool = False, noise: float = 0.0, num_drawn: int = len(DRAWN)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([BASE], dtype=torch.float64), requires_grad=False)
        self.has_adapter = has_adapter
        self.noise = noise
        self.drawn = DRAWN[:num_drawn]
        self.served = {0: BASE}
        self.info = SimpleNamespace(instance_id="instance-1")
        self.calls: list[str] = []
        self.is_undisturbed = False
        self.arrives: Callable[[int, float], float] = lambda version, value: value
        self.draws_with: Callable[[int], float] = lambda version: self.served[version]
        self.on_recovered: Callable[[], None] | None = None
        self.on_claimed_again: Callable[[], None] | None = None

    def sync(self, *, check_interval: int = 1, tolerance: float = 1e-3) -> ProvenSync:
        world = cast(Any, self)
        return ProvenSync(world, world, world, tolerance=tolerance, check_interval=check_interval)

    def become(self, value: float) -> None:
        """An optimizer step."""
        self.weight.fill_(value)

    def restart(self) -> None:
        """The server's process is another one, claimed again: hooks as the client calls them."""
        pushed = {version: value for version, value in self.served.items() if version not in (0, CANARY_VERSION)}
        self.served = {0: BASE}
        self.info.instance_id += "-again"
        if self.on_claimed_again is not None:
            self.on_claimed_again()
        self.served |= {version: self.arrives(version, value) for version, value in pushed.items()}
        if self.on_recovered is not None:
            self.on_recovered()

    # The delivery

    def deliver(self, version: int) -> Delivered:
        assert self.is_undisturbed, "another thread may send the canary meanwhile"
        self.calls.append(f"deliver {version}")
        self._take(version, self.weight.item())
        return Delivered(save_s=0.25, load_s=0.5, digest=str(self.weight.item()))

    # The client

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        assert not self.is_undisturbed
        self.is_undisturbed = True
        yield
        self.is_undisturbed = False

    def set_adapter(self, version: int, digest: str) -> None:
        self.calls.append(f"set {version}")
        self._take(version, float(digest))

    def score(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], temperature: float, version: int
    ) -> list[list[float]]:
        assert (prompts, temperature) == ([PROBE.context], 0.7)
        assert tuple(tokens[0]) in (TOKENS, self.drawn)
        self.calls.append(f"score {version}")
        return [[self.served[version] + self.noise * (1 if version % 2 else -1)] * len(tokens[0])]

    def generate(self, request: GenerateRequest) -> GenerateResponse:
        assert (request.prompts, request.sampling.temperature) == ([list(PROBE.context)], 0.7)
        version = request.adapter_version
        self.calls.append(f"draw {version}")
        logprobs: list[float | None] = [self.draws_with(version)] * len(self.drawn)
        drawn = Completion(ids=list(self.drawn), logprobs=logprobs, finish_reason="length")
        groups = [Group(index=0, completions=[drawn])]
        return GenerateResponse(request_id="r", instance_id="i", adapter_version=version, groups=groups)

    # The trainer's side

    def policy(self) -> nn.Module:
        return self

    def current(self, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
        return self.weight.repeat(len(tokens))

    def base(self, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
        return torch.full((len(tokens),), BASE, dtype=torch.float64)

    def _take(self, version: int, value: float) -> None:
        if not self.has_adapter:
            self.served.clear()
        self.served[version] = self.arrives(version, value)
