"""The embedded engine: a transformers model, the adapter merged into a copy of the weights it touches.

    event loop: generate / score / load_... ─► one queue ─► worker thread, which alone touches the model
                      └─ groups ◄─ call_soon_threadsafe ◄──────┘

The event loop stays free to answer `/health/`. The queue is also what makes versions safe: a request runs to its end on
the version it asked for, and the next one swaps weights first if it must.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from axolotl.errors import ServerError
from axolotl.serving.engines.attention import GROUPED_SDPA
from axolotl.serving.engines.decoding import DEFAULT_CACHE_TOKENS, decode
from axolotl.serving.engines.full_weights import check_weight_files, copy_tensors, copy_weights
from axolotl.serving.engines.inference import DecodingCancelled
from axolotl.serving.engines.lora import LoraPair, read_adapter
from axolotl.serving.engines.merging import MergedWeights
from axolotl.serving.engines.options import token_rules
from axolotl.serving.engines.protocol import EngineName, EngineProgress, EngineRejects, EngineSettings
from axolotl.serving.engines.scoring import score
from axolotl.serving.engines.work import Work
from axolotl.serving.fingerprint import fingerprint
from axolotl.serving.wire import Fingerprint, Group, Sampling, WeightTransport

T = TypeVar("T")


class TransformersEngine:
    """See the module. Build it with `create`.

    read_base: reads the base model again, in this engine's number format, and returns its `state_dict`. Called in the
    worker thread when pushed weights have to give way; the second copy lives for that moment only.
    """

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
        self._calls: set[threading.Event] = set()
        self._is_closing = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        # From here on the worker thread's, but for `_died`.
        self._merged = MergedWeights(model)
        self._policies: dict[int, dict[str, LoraPair]] = {0: {}}
        self._plain_version = 0
        self._active_version: int | None = 0
        self._fault: ServerError | None = None
        self._died = asyncio.Event()

    @classmethod
    async def create(cls, settings: EngineSettings) -> TransformersEngine:
        """Load model and tokenizer off the event loop."""
        return await asyncio.to_thread(_load, settings)

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

        with self._cancellable(work) as running:
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

        with self._cancellable(work) as running:
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

        return await self._run(work)

    async def unload_adapter(self, version: int) -> None:
        def work() -> None:
            if version == self._plain_version:
                return
            if self._active_version == version:
                self._activate(self._plain_version)
            self._policies.pop(version, None)

        await self._run(work)

    async def load_weights(self, version: int, directory: Path) -> int:
        """See `Engine`. float64, float32, float16 and bfloat16 are converted to what the model computes in."""
        loop = asyncio.get_running_loop()

        def work() -> int:
            weights = check_weight_files(self._model, directory)
            with self._ends_on_failure(loop, f"weights of version {version} were loaded"):
                self._merge(version, {})
                count = copy_weights(self._model, weights)
            self._policies = {version: {}}
            self._plain_version = version
            return count

        return await self._run(work)

    async def reset(self) -> None:
        """See `Engine`. Requests still running belong to whoever had the server before: they are given up."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            with self._ends_on_failure(loop, "the base weights were read again"):
                self._merge(0, {})
                if self._plain_version != 0:
                    copy_tensors(self._model, self._read_base())
            self._policies = {0: {}}
            self._plain_version = 0

        self._give_up_calls()
        await self._run(work)

    def progress(self) -> EngineProgress:
        return EngineProgress(self._work.processed, self._work.generated)

    async def died(self) -> str:
        await self._died.wait()
        assert self._fault is not None
        return self._fault.why

    async def close(self) -> None:
        self._is_closing = True
        self._give_up_calls()
        await asyncio.to_thread(self._worker.shutdown, wait=True, cancel_futures=True)

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

    @contextmanager
    def _ends_on_failure(self, loop: asyncio.AbstractEventLoop, when: str) -> Iterator[None]:
        """Worker thread only. A failure within leaves weights that are neither old nor new: nothing is served again."""
        try:
            yield
        except Exception as error:
            raise self._end(loop, "E-SRV-23", f"it failed while {when} ({type(error).__name__})") from error

    def _end(self, loop: asyncio.AbstractEventLoop, code: str, why: str) -> ServerError:
        """Worker thread only. Nothing is served from here on; returns what every request is told."""
        self._fault = ServerError(
            "the transformers engine cannot serve any more", code=code, why=why, do="restart the server"
        )
        loop.call_soon_threadsafe(self._died.set)
        return self._fault

    @contextmanager
    def _cancellable(self, work: Callable[[Callable[[], bool]], T]) -> Iterator[asyncio.Future[T]]:
        """Run `work(is_cancelled)` in the worker thread; leaving the block gives it up before its next step."""
        cancelled = threading.Event()
        running = self._run(lambda: work(cancelled.is_set))
        running.add_done_callback(_retrieve)
        self._calls.add(cancelled)
        try:
            yield running
        except DecodingCancelled as error:
            raise ServerError(
                "the engine gave up a request",
                code="E-SRV-21",
                why="the server was claimed again or stopped while it ran",
            ) from error
        finally:
            self._calls.discard(cancelled)
            cancelled.set()
            running.cancel()

    def _give_up_calls(self) -> None:
        for cancelled in self._calls:
            cancelled.set()

    def _run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work` for the worker thread."""
        if self._is_closing:
            raise ServerError("the engine gave up a request", code="E-SRV-21", why="the server is stopping")

        loop = asyncio.get_running_loop()

        def run() -> T:
            if self._fault is not None:
                raise self._fault
            try:
                return work()
            except torch.AcceleratorError as error:
                # The device's context is lost; every later call in this process fails as well.
                raise self._end(loop, "E-SRV-20", f"the device failed ({_first_line(error)})") from error
            except torch.OutOfMemoryError as error:
                raise ServerError(
                    "the engine failed on a request",
                    code="E-SRV-21",
                    why=f"out of memory on the device ({_first_line(error)})",
                    do="lower trl.max_completion_length, or leave the server a larger part of the device",
                ) from error

        return loop.run_in_executor(self._worker, run)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _hand_over(loop: asyncio.AbstractEventLoop, finished: asyncio.Queue[Group | None], group: Group) -> None:
    loop.call_soon_threadsafe(finished.put_nowait, group)


def _retrieve(running: asyncio.Future[T]) -> None:
    """A failure of a request that nobody waits for any more is nobody's."""
    if not running.cancelled():
        running.exception()


def _load(settings: EngineSettings) -> TransformersEngine:
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    model = _load_model(settings)
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
        read_base=lambda: _load_model(settings, local_files_only=True).state_dict(),
        max_cache_tokens=cache_tokens(model, settings.kv_cache_bytes),
    )


def _load_model(settings: EngineSettings, *, local_files_only: bool = False) -> PreTrainedModel:
    """On the CPU. local_files_only: after the start nothing is fetched."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        settings.model,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        dtype=getattr(torch, settings.dtype),
        attn_implementation=GROUPED_SDPA,
        local_files_only=local_files_only,
    )
    model.requires_grad_(False)
    return model


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
