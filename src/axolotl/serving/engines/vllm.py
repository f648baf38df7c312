"""The vLLM engine: continuous batching over all requests, several adapter versions at once.

Every completion is a request of its own with its own seed. vLLM would give child k of a request with n > 1 the seed
`seed + k`, whatever seeds were asked for; single requests take any seeds, cost the same inside the engine (which splits
n > 1 anyway), and still share the prompt through the prefix cache.

The engine's processes are started from one thread that lives until `close`: their parent-death signal (see
`vllm_plugin`) fires at the end of that thread, and starting takes long enough that the event loop must not wait for it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from axolotl.errors import ServerError
from axolotl.serving.engines import process_tree
from axolotl.serving.engines.adapter_shapes import base_shapes
from axolotl.serving.engines.protocol import EngineName, EngineProgress, EngineRejects, EngineSettings
from axolotl.serving.engines.traffic import Traffic
from axolotl.serving.engines.vllm_adapters import AdapterSlots
from axolotl.serving.engines.vllm_arguments import lora_rank
from axolotl.serving.engines.vllm_calls import Calls
from axolotl.serving.engines.vllm_environment import prepare_environment, require_vllm
from axolotl.serving.engines.vllm_requests import completion, params_maker
from axolotl.serving.engines.vllm_start import Started, import_vllm, start
from axolotl.serving.engines.vllm_transfer import TransferReceiver
from axolotl.serving.engines.weight_files import Shape, check_layout, check_weights
from axolotl.serving.wire import Group, Sampling, WeightTransport

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams

T = TypeVar("T")

#: Longest that replacing the weights of the largest model may take.
RELOAD_TIMEOUT_S = 900.0

#: What the engine gets to end by itself. It has nothing to save, and its worker often does not notice.
SHUTDOWN_S = 1.0


class VLLMEngine:
    """`Engine` over vLLM's AsyncLLM. Make one with `await VLLMEngine.create(settings)`, end it with `close()`."""

    name: EngineName = "vllm"

    def __init__(self, started: Started, settings: EngineSettings, starter: ThreadPoolExecutor) -> None:
        llm = started.llm
        self.fingerprint = started.fingerprint
        self.dtype = settings.dtype
        self.device = settings.device
        self.max_model_len: int = llm.model_config.max_model_len
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self.max_lora_rank = lora_rank(settings.max_lora_rank) if settings.max_lora_rank > 0 else None
        self.processes = started.processes
        self._llm = llm
        self._counter = started.counter
        self._starter = starter
        self._model_directory = started.model_directory
        self._base_shapes = base_shapes(started.model_directory)
        self._calls = Calls(llm, started.processes, self._tokens, stall_s=settings.stall_timeout_s)
        self._traffic = Traffic()
        self._change_lock = asyncio.Lock()
        self._adapters = AdapterSlots(
            llm, self._calls, self._base_shapes, max_rank=self.max_lora_rank, num_slots=settings.max_loras
        )
        self._weights_version = 0
        self._closed = False
        self.weight_transports: tuple[WeightTransport, ...] = ("files", "nccl") if started.gpus else ("files",)
        self.receiver = TransferReceiver(llm, self._calls, self, started.gpus) if started.gpus else None

    @classmethod
    async def create(cls, settings: EngineSettings) -> VLLMEngine:
        """Start the engine and wait until it can generate. Raises `EnvironmentFault` with the reason when it cannot."""
        require_vllm(settings)
        prepare_environment(settings)
        starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(starter, import_vllm)
            started = await loop.run_in_executor(starter, start, settings)
        except BaseException:
            starter.shutdown(wait=False)
            raise
        engine = cls(started, settings, starter)
        await engine._warm_up()
        return engine

    async def _warm_up(self) -> None:
        """One token, so that what vLLM prepares on first use is not on the clock of the first request."""
        try:
            async for _ in self.generate([[0]], Sampling(max_tokens=1), [[0]], 0):
                pass
        except BaseException:
            await self.close()
            raise

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        adapter_version: int,
    ) -> AsyncIterator[Group]:
        make = params_maker(sampling)
        rows = [[make(seed) for seed in row] for row in seeds]
        await self._traffic.open()
        adapter = self._adapter(adapter_version)
        era = self._calls.era
        tasks = [
            self._traffic.start(self._group(index, prompt, row, adapter, era))
            for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            await _cancel(tasks)

    async def _group(
        self, index: int, prompt: Sequence[int], row: Sequence[SamplingParams], adapter: LoRARequest | None, era: int
    ) -> Group:
        outputs = await _gather([self._calls.request(prompt, params, adapter, era) for params in row])
        return Group(index=index, completions=[completion(output) for output in outputs])

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        temperature: float,
        adapter_version: int,
    ) -> list[list[float]]:
        """Each token is asked for on its own: its log-prob in the first step after its prefix, one short request a
        token with the prefixes cached, right at every temperature.

        vLLM's prompt log-probs would take one request a row, but they know no temperature, and with adapters enabled
        they end the engine as soon as two requests meet in one step.
        """
        make = params_maker(Sampling(max_tokens=1, temperature=temperature))
        make(0)
        await self._traffic.open()
        adapter = self._adapter(adapter_version)
        era = self._calls.era

        async def one(prefix: list[int], token: int) -> float:
            params = make(0)
            params.logprobs, params.logprob_token_ids = None, [token]
            flat: Any = (await self._calls.request(prefix, params, adapter, era)).outputs[0].logprobs
            return float(flat.logprobs[flat.token_ids.index(token)])

        async def all_tokens() -> list[list[float]]:
            rows = zip(prompts, tokens, strict=True)
            prefixes = [([*prompt, *row[:at]], token) for prompt, row in rows for at, token in enumerate(row)]
            scores = iter(await _gather([one(prefix, token) for prefix, token in prefixes]))
            return [[next(scores) for _ in row] for row in tokens]

        task = self._traffic.start(all_tokens())
        try:
            return await task
        finally:
            await _cancel([task])

    async def load_adapter(self, version: int, directory: Path) -> int:
        async with self._change_lock:
            if self._weights_version:
                raise EngineRejects(f"full weights (version {self._weights_version}) are served, not the base model")
            return await self._adapters.load(version, directory)

    async def unload_adapter(self, version: int) -> None:
        async with self._change_lock:
            await self._adapters.unload(version)

    def check_sampling(self, sampling: Sampling) -> None:
        self._calls.check(params_maker(sampling)(0))

    async def load_weights(self, version: int, directory: Path) -> int:
        num_tensors = await asyncio.to_thread(check_weights, directory, self._base_shapes, is_tied=self._is_tied)
        await self.replace_weights(version, lambda: self._reload(directory), hidden=directory)
        return num_tensors

    def check_layout(self, shapes: Mapping[str, Shape]) -> None:
        """Raise `EngineRejects` unless weights of these shapes are the model's, each of them once."""
        if twice := check_layout(shapes, self._base_shapes, is_tied=self._is_tied):
            raise EngineRejects(f"tensor {twice[0]!r} is also the output layer, and comes twice")

    async def replace_weights(
        self, version: int, load: Callable[[], Awaitable[None]], *, hidden: Path | None = None
    ) -> None:
        """Serve `version` once `load` has overwritten the weights, after the requests in flight.

        hidden: a path that errors must not show.
        """
        async with self.quiet():
            await self._replace_weights(load, hidden)
            self._weights_version = version

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """No request runs and nothing else changes."""
        async with self._change_lock, self._traffic.stopped():
            yield

    @property
    def _is_tied(self) -> bool:
        config: Any = self._llm.model_config.hf_text_config
        return bool(config.tie_word_embeddings)

    async def _reload(self, directory: Path) -> None:
        reload = self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
        await self._calls.reload(reload, timeout_s=RELOAD_TIMEOUT_S)

    async def _replace_weights(self, load: Callable[[], Awaitable[None]], hidden: Path | None = None) -> None:
        """It is quiet. vLLM overwrites the weights in place: after a failure they are nobody's."""
        await self._adapters.unload_all()
        calls, llm = self._calls, self._llm
        try:
            await calls.control(llm.pause_generation(mode="wait"))
            await load()
            await calls.control(llm.collective_rpc("axolotl_repack_output"))
            await self._clear_caches()
            await calls.control(llm.resume_generation())
        except BaseException as error:
            reason = str(error) or type(error).__name__
            if hidden is not None:
                reason = reason.replace(str(hidden), "the directory")
            fault = ServerError(
                "vLLM failed to replace its weights",
                code="E-SRV-23",
                why=reason.splitlines()[0],
                do="restart the server",
            )
            calls.fail(fault)
            if not isinstance(error, Exception):
                raise
            raise fault from error

    async def _clear_caches(self) -> None:
        if not await self._calls.control(self._llm.reset_prefix_cache()):
            raise ServerError(
                "the prefix cache could not be cleared",
                code="E-SRV-22",
                why="vLLM still holds requests",
                do="restart the server",
            )

    def progress(self) -> EngineProgress:
        return EngineProgress(work=self._tokens() + self._calls.reloading, generated=self._counter.generated)

    def _tokens(self) -> int:
        return self._counter.prompt + self._counter.generated

    async def died(self) -> str:
        reason = await self._calls.died(self.processes)
        if self._closed:
            await asyncio.Event().wait()  # it did not die, it was closed
        return reason

    async def reset(self) -> None:
        """Requests still running belong to whoever had the server before: they are aborted."""
        await self._calls.abort_all()
        async with self._change_lock:
            if self.receiver is not None:
                await self.receiver.unlink()
            if self._weights_version:
                async with self._traffic.stopped():
                    base = self._model_directory
                    await self._replace_weights(lambda: self._reload(base), hidden=base)
                    self._weights_version = 0
                return
            await self._adapters.unload_all()
            await self._clear_caches()

    async def close(self) -> None:
        """Shut the engine down and make sure that none of the processes it started is left."""
        if self._closed:
            return
        self._closed = True
        await self._calls.abort_all()
        if self._llm.output_handler is not None:
            # It would take the engine's end for a failure and log it as one.
            self._llm.output_handler.cancel()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._starter, self._llm.shutdown, SHUTDOWN_S)
        await loop.run_in_executor(self._starter, process_tree.stop, set(self.processes))
        del self._llm
        gc.collect()  # its client sits in reference cycles and complains when it is collected at the interpreter's end
        self._starter.shutdown(wait=False)

    def _adapter(self, version: int) -> LoRARequest | None:
        """None for the model's own weights, be they the base model's or pushed ones."""
        if version == self._weights_version:
            return None
        adapter = self._adapters.get(version)
        if adapter is None:
            loaded = [self._weights_version, *self._adapters.versions]
            raise EngineRejects(f"version {version} is not loaded; loaded: {loaded}")
        return adapter


async def _gather(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what has not ended and wait for all of it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
