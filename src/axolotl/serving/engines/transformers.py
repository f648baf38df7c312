"""The embedded engine: a transformers model, the adapter merged into a copy of the weights it touches.

    event loop: generate / score / load_... ─► one queue ─► worker thread, which alone touches the model
                      └─ groups ◄─ call_soon_threadsafe ◄──────┘

The event loop stays free to answer `/health/`. The queue is also what makes versions safe: a request runs to its end on
the version it asked for, and the next one swaps weights first if it must.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from axolotl.serving.engines.decoding import DEFAULT_CACHE_TOKENS, decode
from axolotl.serving.engines.full_weights import check_weight_files, copy_tensors, copy_weights
from axolotl.serving.engines.lora import LoraPair, read_adapter
from axolotl.serving.engines.merging import MergedWeights
from axolotl.serving.engines.options import token_rules
from axolotl.serving.engines.protocol import (
    EngineName,
    EngineProgress,
    EngineRejects,
    EngineSettings,
    WeightReceiver,
)
from axolotl.serving.engines.scoring import score
from axolotl.serving.engines.transformers_start import load
from axolotl.serving.engines.work import Work
from axolotl.serving.engines.worker import Worker
from axolotl.serving.wire import Fingerprint, Group, Sampling, WeightTransport


class TransformersEngine:
    """See the module. Build it with `create`.

    read_base: reads the base model again, in this engine's number format, and returns its `state_dict`. Called in the
    worker thread when pushed weights have to give way; the second copy lives for that moment only.
    """

    name: EngineName = "transformers"
    weight_transports: tuple[WeightTransport, ...] = ("files",)
    receiver: WeightReceiver | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_fingerprint: Fingerprint,
        eos_token_ids: frozenset[int],
        pad_token_id: int,
        max_model_len: int,
        max_lora_rank: int | None,
        read_base: Callable[[], Mapping[str, torch.Tensor]],
        max_cache_tokens: int = DEFAULT_CACHE_TOKENS,
    ) -> None:
        self.fingerprint = model_fingerprint
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = str(model.device)
        self.max_model_len = max_model_len
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.max_lora_rank = max_lora_rank
        self._model = model
        self._eos_token_ids = eos_token_ids
        self._pad_token_id = pad_token_id
        self._max_cache_tokens = max_cache_tokens
        self._read_base = read_base
        self._work = Work()
        self._worker = Worker()
        # From here on the worker thread's.
        self._merged = MergedWeights(model)
        self._policies: dict[int, dict[str, LoraPair]] = {0: {}}
        self._plain_version = 0
        self._active_version: int | None = 0

    @classmethod
    async def create(cls, settings: EngineSettings) -> TransformersEngine:
        """Load model and tokenizer off the event loop."""
        loaded = await asyncio.to_thread(load, settings)
        return cls(
            loaded.model,
            model_fingerprint=loaded.fingerprint,
            eos_token_ids=loaded.eos_token_ids,
            pad_token_id=loaded.pad_token_id,
            max_model_len=settings.max_model_len,
            max_lora_rank=settings.max_lora_rank or None,
            read_base=loaded.read_base,
            max_cache_tokens=loaded.max_cache_tokens,
        )

    def check_sampling(self, sampling: Sampling) -> None:
        token_rules(sampling, self._eos_token_ids, self.vocab_size)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        adapter_version: int,
    ) -> AsyncIterator[Group]:
        self.check_sampling(sampling)
        loop = asyncio.get_running_loop()
        finished: asyncio.Queue[Group | None] = asyncio.Queue()

        def work(is_cancelled: Callable[[], bool]) -> None:
            self._activate(adapter_version)
            decode(
                self._model,
                prompts,
                sampling,
                seeds,
                eos_token_ids=self._eos_token_ids,
                pad_token_id=self._pad_token_id,
                max_cache_tokens=self._max_cache_tokens,
                is_cancelled=is_cancelled,
                on_group=lambda group: _hand_over(loop, finished, group),
                work=self._work,
            )

        with self._worker.cancellable(work) as running:
            running.add_done_callback(lambda _: finished.put_nowait(None))
            while (group := await finished.get()) is not None:
                yield group
            await running

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        temperature: float,
        adapter_version: int,
    ) -> list[list[float]]:
        def work(is_cancelled: Callable[[], bool]) -> list[list[float]]:
            self._activate(adapter_version)
            return score(self._model, prompts, tokens, temperature, is_cancelled=is_cancelled, work=self._work)

        with self._worker.cancellable(work) as running:
            return await running

    async def load_adapter(self, version: int, directory: Path) -> int:
        def work() -> int:
            if version in self._policies:
                raise EngineRejects(f"version {version} is already loaded; every version is loaded once")
            pairs = read_adapter(directory, max_rank=self.max_lora_rank)
            self._merged.check(pairs)
            self._merge(version, pairs)
            self._policies[version] = pairs
            return len(pairs)

        return await self._worker.run(work)

    async def unload_adapter(self, version: int) -> None:
        def work() -> None:
            if version == self._plain_version:
                return
            if self._active_version == version:
                self._activate(self._plain_version)
            self._policies.pop(version, None)

        await self._worker.run(work)

    async def load_weights(self, version: int, directory: Path) -> int:
        """See `Engine`. float64, float32, float16 and bfloat16 are converted to what the model computes in."""
        loop = asyncio.get_running_loop()

        def work() -> int:
            weights = check_weight_files(self._model, directory)
            with self._worker.ends_on_failure(loop, f"weights of version {version} were loaded"):
                self._merge(version, {})
                count = copy_weights(self._model, weights, self._work)
            self._policies = {version: {}}
            self._plain_version = version
            return count

        return await self._worker.run(work)

    async def reset(self) -> None:
        """See `Engine`. Requests still running belong to whoever had the server before: they are given up."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            with self._worker.ends_on_failure(loop, "the base weights were read again"):
                self._merge(0, {})
                if self._plain_version != 0:
                    copy_tensors(self._model, self._read_base(), self._work)
            self._policies = {0: {}}
            self._plain_version = 0

        self._worker.give_up_calls()
        await self._worker.run(work)

    def progress(self) -> EngineProgress:
        return EngineProgress(self._work.processed, self._work.generated)

    async def died(self) -> str:
        return await self._worker.died()

    async def close(self) -> None:
        await self._worker.close()

    def _activate(self, version: int) -> None:
        """Worker thread only."""
        if version not in self._policies:
            raise EngineRejects(f"version {version} is not loaded; loaded: {sorted(self._policies)}")
        if version != self._active_version:
            self._merge(version, self._policies[version])

    def _merge(self, version: int, pairs: dict[str, LoraPair]) -> None:
        """Worker thread only. While it runs, and if it fails, the model is of no version."""
        self._active_version = None
        self._merged.merge(pairs)
        self._active_version = version


def _hand_over(loop: asyncio.AbstractEventLoop, finished: asyncio.Queue[Group | None], group: Group) -> None:
    loop.call_soon_threadsafe(finished.put_nowait, group)
