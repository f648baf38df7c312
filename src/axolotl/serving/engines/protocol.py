"""What the HTTP app needs from an engine. Two engines implement it: vLLM and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from axolotl.serving.wire import Fingerprint, Group, Sampling

EngineName = Literal["vllm", "transformers"]


@dataclass(frozen=True)
class EngineSettings:
    """Everything an engine is built from; made from the config in `scripts/vllm_serve_lora.py`.

    dtype is resolved (`float32`, `bfloat16` or `float16`, never `auto`). `max_lora_rank` is the rank that the config
    trains with, 0 without an adapter; an engine rounds it up as it must. `kv_cache_bytes` bounds the cache on a CPU.
    """

    model: str
    revision: str | None
    device: str
    dtype: str
    max_model_len: int
    max_lora_rank: int
    max_loras: int
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    trust_remote_code: bool = False
    reasoning_parser: str | None = None
    seed: int = 0


class EngineRejects(ValueError):
    """A request or adapter that this engine cannot serve; the app answers 422 with this text. The engine lives on."""


class Engine(Protocol):
    """One model, several adapter versions. Called by the app on its event loop only; methods may run concurrently."""

    name: EngineName
    fingerprint: Fingerprint
    dtype: str
    max_model_len: int
    vocab_size: int
    max_lora_rank: int | None

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        adapter_version: int,
    ) -> list[Group]:
        """Sample `sampling.n` completions of each prompt with the adapter `adapter_version` (0: base model).

        Returns one group a prompt, in order. Raises `EngineRejects` for what it does not support.
        """
        ...

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        temperature: float,
        adapter_version: int,
    ) -> list[list[float]]:
        """Log-probs of `tokens[i]` after `prompts[i]`, one a token, of the temperature-scaled distribution."""
        ...

    async def load_adapter(self, version: int, directory: Path) -> int:
        """Load the adapter in `directory` eagerly as `version` and return how many modules it reached.

        Requests in flight finish on the version they asked for. Raises `EngineRejects` for a bad adapter, after which
        the versions loaded before still serve.
        """
        ...

    async def unload_adapter(self, version: int) -> None:
        """Forget `version`; called when no request uses it."""
        ...

    async def reset(self) -> None:
        """Back to the base model with empty caches: no adapter, no prefix cache."""
        ...

    async def close(self) -> None:
        """Free everything, child processes included."""
        ...
