"""What the HTTP app needs from an engine. Two engines implement it: vLLM and transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from axolotl.serving.wire import Fingerprint, Group, Sampling, TensorLayout, WeightTransport

EngineName = Literal["vllm", "transformers"]


@dataclass(frozen=True)
class EngineSettings:
    """Everything an engine is built from; made from the config in `scripts/vllm_serve_lora.py`.

    dtype is resolved (`float32`, `bfloat16` or `float16`, never `auto`). `max_lora_rank` is the rank that the config
    trains with, 0 without an adapter; an engine rounds it up as it must. `kv_cache_bytes` bounds the cache on a CPU.
    `stall_timeout_s`: an engine that does nothing for so long hangs.
    `weight_transfer`: full weights may come over NCCL.
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
    stall_timeout_s: float = 300.0
    weight_transfer: bool = False


class EngineRejects(ValueError):
    """A request or adapter that this engine cannot serve; the app answers 422 with this text. The engine lives on."""


@dataclass(frozen=True)
class EngineProgress:
    """work: tokens processed since the start, prompts included, and what was done to replace weights; it never falls,
    and stands still only when the engine does. generated: tokens that were sampled."""

    work: int
    generated: int


class WeightReceiver(Protocol):
    """Full weights from the trainer's GPU to the engine's, without files. Called as `Engine` is.

    ranks: the engine's GPUs by uuid, one a worker. is_linked: whether they are in a group with a trainer.
    """

    ranks: tuple[str, ...]

    @property
    def is_linked(self) -> bool: ...

    async def link(self, unique_id: str) -> None:
        """Join the trainer's group of NCCL; returns when every worker has. Raises `EngineRejects` when they could not,
        `ServerError` when it is not known whether they did: the engine cannot serve after that."""
        ...

    def check(self, tensors: Sequence[TensorLayout]) -> None:
        """Raise `EngineRejects` unless these are the model's weights: all that can be known before the trainer
        sends."""
        ...

    async def receive(self, version: int, tensors: Sequence[TensorLayout]) -> int:
        """As `Engine.load_weights`, with what the trainer sends meanwhile. Whatever ends it before the end, a
        cancellation too, ends the engine: nobody could say which weights it has."""
        ...


class Engine(Protocol):
    """One model, several policy versions. Called by the app on its event loop only; methods may run concurrently."""

    name: EngineName
    fingerprint: Fingerprint
    dtype: str
    device: str
    weight_transports: tuple[WeightTransport, ...]
    max_model_len: int
    vocab_size: int
    max_lora_rank: int | None

    @property
    def receiver(self) -> WeightReceiver | None:
        """Who takes full weights over NCCL; None where they come as files only."""
        ...

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise `EngineRejects` naming the first option that `generate` would not honour."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        adapter_version: int,
    ) -> AsyncIterator[Group]:
        """Sample `sampling.n` completions of each prompt with the policy `adapter_version` (0: base model).

        An async generator: one group a prompt, each as soon as it is finished, in any order (`Group.index` names the
        prompt). Closing it before its end aborts what is left. Raises `EngineRejects` for what it does not support,
        before the first group.
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

    async def load_weights(self, version: int, directory: Path) -> int:
        """Replace the model's weights by those in `directory` (`*.safetensors`, the model's own tensor names) and serve
        them as `version`; returns how many tensors were replaced. Every adapter is dropped.

        The files have been verified. Names, shapes and dtypes are checked here, all of them before anything changes:
        `EngineRejects` leaves the engine as it was. Requests in flight end first, on the weights they began with.
        Raises `ServerError` when the reload itself fails; the engine cannot serve after that (see `died`).
        """
        ...

    def progress(self) -> EngineProgress:
        """Never blocks."""
        ...

    async def died(self) -> str:
        """Returns, with the reason, once the engine can never serve again; waits for ever otherwise."""
        ...

    async def reset(self) -> None:
        """Back to the base model with empty caches: no adapter, no pushed weights, no prefix cache."""
        ...

    async def close(self) -> None:
        """Free everything, child processes included."""
        ...
