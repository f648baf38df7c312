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
import itertools
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from axolotl.errors import ServerError
from axolotl.serving.engines import process_tree
from axolotl.serving.engines.adapter_shapes import base_shapes, check_shapes
from axolotl.serving.engines.lora import read_adapter
from axolotl.serving.engines.protocol import EngineName, EngineProgress, EngineRejects, EngineSettings
from axolotl.serving.engines.vllm_arguments import lora_rank
from axolotl.serving.engines.vllm_environment import prepare_environment, require_vllm
from axolotl.serving.engines.vllm_requests import completion, engine_reason, first_line, params_maker
from axolotl.serving.engines.vllm_start import Started, import_vllm, start
from axolotl.serving.wire import Group, Sampling, WeightTransport

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

T = TypeVar("T")

#: How often a control call looks whether the engine still lives; vLLM never answers a call whose engine died.
ALIVE_CHECK_S = 0.5

#: Longest a control call (an adapter, a cache reset) may take.
CONTROL_TIMEOUT_S = 120.0

#: What the engine gets to end by itself. It has nothing to save, and its worker often does not notice.
SHUTDOWN_S = 1.0


class VLLMEngine:
    """`Engine` over vLLM's AsyncLLM. Make one with `await VLLMEngine.create(settings)`, end it with `close()`."""

    name: EngineName = "vllm"
    weight_transports: tuple[WeightTransport, ...] = ("files",)

    def __init__(self, started: Started, settings: EngineSettings, starter: ThreadPoolExecutor) -> None:
        llm = started.llm
        self.fingerprint = started.fingerprint
        self.dtype = settings.dtype
        self.device = settings.device
        self.max_model_len: int = llm.model_config.max_model_len
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self.max_lora_rank = lora_rank(settings.max_lora_rank) if settings.max_lora_rank > 0 else None
        self.processes = started.processes
        self._max_loras = settings.max_loras
        self._llm = llm
        self._starter = starter
        self._base_shapes = base_shapes(started.model_directory)
        self._adapters: dict[int, LoRARequest] = {}
        self._adapter_lock = asyncio.Lock()
        self._request_ids = itertools.count()
        self._running: set[str] = set()
        self._closed = False

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
        adapter = self._adapter(adapter_version)
        make = params_maker(sampling)
        requests = [
            self._run(prompt, make(seed), adapter) for prompt, row in zip(prompts, seeds, strict=True) for seed in row
        ]
        completions = iter([completion(output) for output in await _gather(requests)])
        for index, row in enumerate(seeds):
            yield Group(index=index, completions=[next(completions) for _ in row])

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
        adapter = self._adapter(adapter_version)
        make = params_maker(Sampling(max_tokens=1, temperature=temperature))

        async def one(prefix: list[int], token: int) -> float:
            params = make(0)
            params.logprobs, params.logprob_token_ids = None, [token]
            flat: Any = (await self._run(prefix, params, adapter)).outputs[0].logprobs
            return float(flat.logprobs[flat.token_ids.index(token)])

        scores = iter(
            await _gather(
                [
                    one([*prompt, *row[:position]], token)
                    for prompt, row in zip(prompts, tokens, strict=True)
                    for position, token in enumerate(row)
                ]
            )
        )
        return [[next(scores) for _ in row] for row in tokens]

    async def load_adapter(self, version: int, directory: Path) -> int:
        from vllm.lora.request import LoRARequest

        if self.max_lora_rank is None:
            raise EngineRejects("this server was started without an adapter in its config, so it can load none")
        modules = await asyncio.to_thread(read_adapter, directory, max_rank=self.max_lora_rank)
        check_shapes(modules, self._base_shapes)
        async with self._adapter_lock:
            if version in self._adapters:
                raise EngineRejects(f"adapter version {version} is already loaded; every version is loaded once")
            if len(self._adapters) >= self._max_loras:
                held = sorted(self._adapters)
                raise EngineRejects(f"no free adapter slot: versions {held} are loaded, unload one first")
            request = LoRARequest(f"policy-v{version}", version, str(directory))
            try:
                await self._control(self._llm.add_lora(request))
                await self._check_reached(version)
            except EngineRejects as error:
                await self._control(self._llm.remove_lora(version))
                # The text travels to the client, who is told no paths of this machine.
                raise EngineRejects(str(error).replace(str(directory), "the adapter")) from error
            self._adapters[version] = request
        return len(modules)

    async def _check_reached(self, version: int) -> None:
        """Ask every worker for modules of the adapter that found no layer; vLLM serves such an adapter silently."""
        for unreached in await self._control(self._llm.collective_rpc("axolotl_unreached_modules", args=(version,))):
            if unreached is None:
                raise EngineRejects(f"adapter version {version} was not kept by the engine")
            if unreached:
                shown = ", ".join(unreached[:3])
                raise EngineRejects(f"{len(unreached)} modules of the adapter are not in the model: {shown}")

    async def unload_adapter(self, version: int) -> None:
        async with self._adapter_lock:
            if self._adapters.pop(version, None) is not None:
                await self._control(self._llm.remove_lora(version))

    def check_sampling(self, sampling: Sampling) -> None:
        params_maker(sampling)(0)

    async def load_weights(self, version: int, directory: Path) -> int:
        raise EngineRejects("full weights are not served yet")

    def progress(self) -> EngineProgress:
        return EngineProgress(0, 0)

    async def died(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    async def reset(self) -> None:
        """Requests still running belong to whoever had the server before: they are aborted."""
        await self._abort_running()
        for version in sorted(self._adapters):
            await self.unload_adapter(version)
        if not await self._control(self._llm.reset_prefix_cache()):
            raise ServerError(
                "the prefix cache could not be cleared",
                code="E-SRV-22",
                why="vLLM still holds requests",
                do="restart the server",
            )

    async def close(self) -> None:
        """Shut the engine down and make sure that none of the processes it started is left."""
        if self._closed:
            return
        self._closed = True
        await self._abort_running()
        if self._llm.output_handler is not None:
            # It would take the engine's end for a failure and log it as one.
            self._llm.output_handler.cancel()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._starter, self._llm.shutdown, SHUTDOWN_S)
        await loop.run_in_executor(self._starter, process_tree.stop, set(self.processes))
        del self._llm
        gc.collect()  # its client sits in reference cycles and complains when it is collected at the interpreter's end
        self._starter.shutdown(wait=False)

    async def _abort_running(self) -> None:
        if self._running:
            await self._llm.abort(list(self._running))

    def _adapter(self, version: int) -> LoRARequest | None:
        if version == 0:
            return None
        if version not in self._adapters:
            raise EngineRejects(f"adapter version {version} is not loaded; loaded: {sorted(self._adapters)}")
        return self._adapters[version]

    async def _run(self, prompt: Sequence[int], params: SamplingParams, adapter: LoRARequest | None) -> RequestOutput:
        """One request to its end. Cancelling the task aborts it in the engine."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request_id = f"r{next(self._request_ids)}"
        self._running.add(request_id)
        try:
            outputs = self._llm.generate(tokens_input(list(prompt)), params, request_id, lora_request=adapter)
            final = [output async for output in outputs][-1]
        except VLLMClientError as error:
            raise EngineRejects(first_line(error)) from error
        except EngineDeadError as error:
            raise _dead() from error
        except EngineGenerateError as error:
            if isinstance(error.__cause__, (ValueError, TypeError)):
                raise EngineRejects(first_line(error.__cause__)) from error
            raise ServerError("vLLM failed to generate", code="E-SRV-21", why=repr(error.__cause__)) from error
        finally:
            self._running.discard(request_id)
        if final.outputs[0].finish_reason == "abort":
            raise ServerError("vLLM gave up a request", code="E-SRV-21", why="the engine aborted it")
        return final

    async def _control(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a control call of the engine with a deadline, and notice when the engine dies under it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            for _ in range(math.ceil(CONTROL_TIMEOUT_S / ALIVE_CHECK_S)):
                done, _pending = await asyncio.wait({task}, timeout=ALIVE_CHECK_S)
                if done:
                    return task.result()
                if self._llm.errored or self._llm.engine_core.resources.engine_dead:
                    raise _dead()
        except EngineDeadError as error:
            raise _dead() from error
        except (ServerError, EngineRejects, asyncio.CancelledError):
            raise
        except Exception as error:
            # vLLM hands back what its engine raised as the text of a plain Exception; the engine goes on.
            raise EngineRejects(engine_reason(error)) from error
        finally:
            task.cancel()
        raise ServerError(f"vLLM did not answer within {CONTROL_TIMEOUT_S:.0f} s", code="E-SRV-05")


async def _gather(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _dead() -> ServerError:
    return ServerError(
        "the vLLM engine process died",
        code="E-SRV-20",
        why="its log has the reason (out of memory and a kernel that fails are the usual ones)",
        do="restart the server",
    )
