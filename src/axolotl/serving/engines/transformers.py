"""The embedded engine: a transformers model, the adapter merged into a copy of the weights it touches.

One worker thread owns the model, so the event loop stays free to answer `/health/`. Its queue is also what makes
versions safe: a request runs to its end on the version it asked for, and the next one swaps weights first if it must.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from axolotl.serving.engines.attention import GROUPED_SDPA
from axolotl.serving.engines.decoding import DEFAULT_CACHE_TOKENS, decode
from axolotl.serving.engines.lora import LoraPair, read_adapter
from axolotl.serving.engines.options import token_rules
from axolotl.serving.engines.protocol import EngineName, EngineProgress, EngineRejects, EngineSettings
from axolotl.serving.engines.scoring import score
from axolotl.serving.fingerprint import fingerprint
from axolotl.serving.wire import Fingerprint, Group, Sampling, WeightTransport

T = TypeVar("T")


class MergedWeights:
    """Which adapter is merged into a model. Merging always starts from the base weights, so nothing drifts.

    The base tensors stay untouched; each touched module gets one extra buffer, made at its first merge.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
        }
        self._base: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._merged: frozenset[str] = frozenset()

    def check(self, pairs: dict[str, LoraPair]) -> None:
        """Raise `EngineRejects` unless every pair fits a linear module of the model."""
        for name, pair in pairs.items():
            if name not in self._modules:
                raise EngineRejects(f"the model has no linear module {name!r}")
            module = self._modules[name]
            expected = tuple(module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape)
            if (pair.b.shape[0], pair.a.shape[1]) != expected:
                raise EngineRejects(
                    f"module {name!r} is {expected[1]} -> {expected[0]}, "
                    f"the adapter is for {pair.a.shape[1]} -> {pair.b.shape[0]}"
                )

    def merge(self, pairs: dict[str, LoraPair]) -> None:
        """Make the model compute base + scale * B @ A in exactly the modules of `pairs`; none of them means base."""
        for name in self._merged - pairs.keys():
            self._modules[name].weight.data = self._base[name]
        for name, pair in pairs.items():
            module = self._modules[name]
            base = self._base.setdefault(name, module.weight.data)
            buffer = self._buffers.setdefault(name, torch.empty_like(base))
            a = pair.a.to(base.device, torch.float32)
            b = pair.b.to(base.device, torch.float32)
            left, right = (a.T, b.T) if isinstance(module, Conv1D) else (b, a)
            if base.dtype == torch.float32:
                torch.addmm(base, left, right, alpha=pair.scale, out=buffer)
            else:
                buffer.copy_(torch.addmm(base.float(), left, right, alpha=pair.scale))
            module.weight.data = buffer
        self._merged = frozenset(pairs)


class TransformersEngine:
    """See the module. Build it with `create`."""

    name: EngineName = "transformers"
    weight_transports: tuple[WeightTransport, ...] = ("files",)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_fingerprint: Fingerprint,
        eos_token_ids: frozenset[int],
        pad_token_id: int,
        max_model_len: int,
        max_lora_rank: int | None,
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
        self._weights = MergedWeights(model)
        self._adapters: dict[int, dict[str, LoraPair]] = {0: {}}
        self._active_version = 0
        self._is_closing = threading.Event()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    @classmethod
    async def create(cls, settings: EngineSettings) -> TransformersEngine:
        """Load model and tokenizer off the event loop."""
        return await asyncio.to_thread(_load, settings)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        adapter_version: int,
    ) -> AsyncIterator[Group]:
        cancelled = threading.Event()

        def work() -> list[Group]:
            self._activate(adapter_version)
            return decode(
                self._model,
                prompts,
                sampling,
                seeds,
                eos_token_ids=self._eos_token_ids,
                pad_token_id=self._pad_token_id,
                max_cache_tokens=self._max_cache_tokens,
                is_cancelled=lambda: cancelled.is_set() or self._is_closing.is_set(),
            )

        try:
            for group in await self._run(work):
                yield group
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        temperature: float,
        adapter_version: int,
    ) -> list[list[float]]:
        def work() -> list[list[float]]:
            self._activate(adapter_version)
            return score(self._model, prompts, tokens, temperature)

        return await self._run(work)

    async def load_adapter(self, version: int, directory: Path) -> int:
        def work() -> int:
            pairs = read_adapter(directory, max_rank=self.max_lora_rank)
            self._weights.check(pairs)
            self._adapters[version] = pairs
            self._activate(version)
            return len(pairs)

        return await self._run(work)

    async def unload_adapter(self, version: int) -> None:
        def work() -> None:
            if self._active_version == version:
                self._activate(0)
            self._adapters.pop(version, None)

        await self._run(work)

    def check_sampling(self, sampling: Sampling) -> None:
        token_rules(sampling, self._eos_token_ids, self.vocab_size)

    async def load_weights(self, version: int, directory: Path) -> int:
        raise EngineRejects("full weights are not served yet")

    def progress(self) -> EngineProgress:
        return EngineProgress(0, 0)

    async def died(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    async def reset(self) -> None:
        def work() -> None:
            self._activate(0)
            self._adapters = {0: {}}

        await self._run(work)

    async def close(self) -> None:
        self._is_closing.set()
        await asyncio.to_thread(self._worker.shutdown, wait=True, cancel_futures=True)

    def _activate(self, version: int) -> None:
        """Worker thread only."""
        if version != self._active_version:
            with torch.inference_mode():
                self._weights.merge(self._adapters[version])
            self._active_version = version

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def _load(settings: EngineSettings) -> TransformersEngine:
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=getattr(torch, settings.dtype), attn_implementation=GROUPED_SDPA, **options
    )
    model.requires_grad_(False)
    model.to(torch.device(settings.device))  # type: ignore[arg-type]  # transformers wraps the method
    tokenizer = AutoTokenizer.from_pretrained(settings.model, **options)
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos_ids = {eos} if isinstance(eos, int) else set(eos or ())
    if tokenizer.eos_token_id is not None:
        eos_ids.add(tokenizer.eos_token_id)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos_ids, default=0)
    return TransformersEngine(
        model,
        model_fingerprint=fingerprint(settings.model, settings.revision, settings.trust_remote_code, tokenizer),
        eos_token_ids=frozenset(eos_ids),
        pad_token_id=pad,
        max_model_len=settings.max_model_len,
        max_lora_rank=settings.max_lora_rank or None,
        max_cache_tokens=cache_tokens(model, settings.kv_cache_bytes),
    )


def cache_tokens(model: PreTrainedModel, kv_cache_bytes: int | None) -> int:
    """How many cache positions, of all layers together, fit into `kv_cache_bytes`; at least 1024."""
    if kv_cache_bytes is None:
        return DEFAULT_CACHE_TOKENS
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    position_bytes = int(2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize)
    return max(1024, kv_cache_bytes // position_bytes)
