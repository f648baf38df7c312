"""An engine without a model: tokens are a function of seed, position and adapter version, and requests can be held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axolotl.errors import ServerError
from axolotl.serving.engines.options import token_rules
from axolotl.serving.engines.protocol import EngineName, EngineProgress, EngineRejects
from axolotl.serving.manifest import ADAPTER_FILES
from axolotl.serving.wire import Completion, Fingerprint, Group, Sampling, WeightTransport

if TYPE_CHECKING:
    from tests.fakes.receiver import FakeReceiver

FAKE_FINGERPRINT = Fingerprint(
    base_model="fake", config="c1", tokenizer="t1", weights="w1", summary={"vocab_size": 100, "hidden_size": 8}
)


class FakeEngine:
    """calls: what was asked of it, in order. gate: `generate` waits for it, so a test decides when a request ends;
    between_groups: it waits for this one after each group. num_open: how many requests run. death: resolve it with a
    reason to make the engine die. load_gate: `load_weights` waits for it; breaks_on_load: it breaks the engine.
    unload_gate: `unload_adapter` waits for it. on_load: called at the end of every load. receiver: takes weights over
    NCCL, if there is one.

    The log-prob of a token under version v is `-(1 + v + token / 100)`.
    """

    name: EngineName = "transformers"
    dtype = "float32"
    device = "cpu"
    max_model_len = 64
    vocab_size = 100

    def __init__(
        self,
        *,
        max_lora_rank: int | None = 16,
        fingerprint: Fingerprint = FAKE_FINGERPRINT,
        receiver: FakeReceiver | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.receiver = receiver
        self.weight_transports: tuple[WeightTransport, ...] = ("files", "nccl") if receiver else ("files",)
        self.max_lora_rank = max_lora_rank
        self.num_modules = 4
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()
        self.fault: Exception | None = None
        self.between_groups = asyncio.Event()
        self.between_groups.set()
        self.death: asyncio.Future[str] | None = None
        self.work = 0
        self.num_open = 0
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.unload_gate = asyncio.Event()
        self.unload_gate.set()
        self.unload_fault: Exception | None = None
        self.breaks_on_load = False
        self.on_load: Callable[[], object] = lambda: None

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        adapter_version: int,
    ) -> AsyncIterator[Group]:
        token_rules(sampling, frozenset())
        self.calls.append(f"generate v{adapter_version}")
        self.num_open += 1
        try:
            self.started.set()
            await self.gate.wait()
            if self.fault is not None:
                raise self.fault
            for index, row in enumerate(seeds):
                self.work += len(prompts[index]) + len(row) * sampling.max_tokens
                completions = [self._completion(seed, sampling, adapter_version) for seed in row]
                yield Group(index=index, completions=completions)
                await self.between_groups.wait()
        finally:
            self.num_open -= 1

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        temperature: float,
        adapter_version: int,
    ) -> list[list[float]]:
        self.calls.append(f"score v{adapter_version}")
        return [[self._logprob(token, adapter_version) for token in row] for row in tokens]

    async def load_adapter(self, version: int, directory: Path) -> int:
        if not all((directory / name).is_file() for name in ADAPTER_FILES):
            raise EngineRejects("files are missing")
        if (directory / "adapter_model.safetensors").read_bytes() == b"bad":
            raise EngineRejects("the tensors are bad")
        self.calls.append(f"load v{version}")
        self.on_load()
        return self.num_modules

    async def unload_adapter(self, version: int) -> None:
        await self.unload_gate.wait()
        if self.unload_fault is not None:
            raise self.unload_fault
        self.calls.append(f"unload v{version}")

    def check_sampling(self, sampling: Sampling) -> None:
        token_rules(sampling, frozenset())

    async def load_weights(self, version: int, directory: Path) -> int:
        if any(path.read_bytes() == b"bad" for path in directory.glob("*.safetensors")):
            raise EngineRejects("the tensors are bad")
        await self.load_gate.wait()
        if self.breaks_on_load:
            raise ServerError("the engine failed to replace its weights", code="E-SRV-23")
        self.calls.append(f"weights v{version}")
        self.on_load()
        return self.num_modules

    def progress(self) -> EngineProgress:
        return EngineProgress(self.work, self.work)

    async def died(self) -> str:
        self.death = asyncio.get_running_loop().create_future()
        return await self.death

    async def reset(self) -> None:
        if self.receiver is not None:
            self.receiver.unlink()
        self.calls.append("reset")

    async def close(self) -> None:
        self.calls.append("close")

    def _completion(self, seed: int, sampling: Sampling, version: int) -> Completion:
        ids = [(seed + position + version) % self.vocab_size for position in range(sampling.max_tokens)]
        return Completion(ids=ids, logprobs=[self._logprob(token, version) for token in ids], finish_reason="length")

    def _logprob(self, token: int, version: int) -> float:
        return float("nan") if token == 99 else -(1 + version + token / 100)
