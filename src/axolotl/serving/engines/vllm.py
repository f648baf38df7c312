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
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from axolotl.errors import EnvironmentFault, ServerError
from axolotl.serving.engines import process_tree
from axolotl.serving.engines.adapter_shapes import base_shapes, check_shapes
from axolotl.serving.engines.lora import read_adapter
from axolotl.serving.engines.protocol import EngineName, EngineRejects, EngineSettings
from axolotl.serving.engines.vllm_arguments import engine_arguments, lora_rank
from axolotl.serving.engines.vllm_environment import go_offline, local_model, prepare_environment, require_vllm
from axolotl.serving.engines.vllm_sampling import sampling_fields
from axolotl.serving.fingerprint import fingerprint
from axolotl.serving.wire import Completion, Fingerprint, Group, Sampling

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

#: How often a control call looks whether the engine still lives; vLLM never answers a call whose engine died.
ALIVE_CHECK_S = 0.5

#: Longest a control call (an adapter, a cache reset) may take.
CONTROL_TIMEOUT_S = 120.0

#: What the engine gets to end by itself. It has nothing to save, and its worker often does not notice.
SHUTDOWN_S = 1.0

LARGEST_SEED = 2**63 - 1


class VLLMEngine:
    """`Engine` over vLLM's AsyncLLM. Make one with `await VLLMEngine.create(settings)`, end it with `close()`."""

    name: EngineName = "vllm"

    def __init__(
        self,
        llm: AsyncLLM,
        settings: EngineSettings,
        model_directory: Path,
        identity: Fingerprint,
        starter: ThreadPoolExecutor,
        processes: set[Any],
    ) -> None:
        self.fingerprint = identity
        self.dtype = settings.dtype
        self.max_model_len: int = llm.model_config.max_model_len
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self.max_lora_rank = lora_rank(settings.max_lora_rank) if settings.max_lora_rank > 0 else None
        self._max_loras = settings.max_loras
        self._llm = llm
        self._starter = starter
        self._processes = processes
        self._base_shapes = base_shapes(model_directory)
        self._adapters: dict[int, LoRARequest] = {}
        self._adapter_lock = asyncio.Lock()
        self._request_ids = itertools.count()
        self._closed = False

    @classmethod
    async def create(cls, settings: EngineSettings) -> VLLMEngine:
        """Start the engine and wait until it can generate. Raises `EnvironmentFault` with the reason when it cannot."""
        require_vllm(settings)
        prepare_environment(settings)
        starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(starter, _import_vllm)
            llm, directory, identity, processes = await loop.run_in_executor(starter, _start, settings)
        except BaseException:
            starter.shutdown(wait=False)
            raise
        engine = cls(llm, settings, directory, identity, starter, processes)
        await engine._warm_up()
        return engine

    async def _warm_up(self) -> None:
        """One token, so that what vLLM prepares on first use is not on the clock of the first request."""
        try:
            await self.generate([[0]], Sampling(max_tokens=1), [[0]], 0)
        except BaseException:
            await self.close()
            raise

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        adapter_version: int,
    ) -> list[Group]:
        adapter = self._adapter(adapter_version)
        make = _params_maker(sampling)
        requests = [
            self._run(prompt, make(seed), adapter) for prompt, row in zip(prompts, seeds, strict=True) for seed in row
        ]
        completions = iter([_completion(output) for output in await _gather(requests)])
        return [Group(index=index, completions=[next(completions) for _ in row]) for index, row in enumerate(seeds)]

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
        make = _params_maker(Sampling(max_tokens=1, temperature=temperature))

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
            except EngineRejects:
                await self._control(self._llm.remove_lora(version))
                raise
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

    async def reset(self) -> None:
        for version in sorted(self._adapters):
            await self.unload_adapter(version)
        if not await self._control(self._llm.reset_prefix_cache()):
            raise ServerError(
                "the prefix cache could not be cleared",
                code="E-SRV-11",
                why="requests of an earlier run are still being generated",
                do="wait for them to end, or restart the server",
            )

    async def close(self) -> None:
        """Shut the engine down and make sure that none of the processes it started is left."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._starter, self._llm.shutdown, SHUTDOWN_S)
        await loop.run_in_executor(self._starter, process_tree.stop, self._processes)
        del self._llm
        gc.collect()  # its client sits in reference cycles and complains when it is collected at the interpreter's end
        self._starter.shutdown(wait=False)

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
        try:
            outputs = self._llm.generate(tokens_input(list(prompt)), params, request_id, lora_request=adapter)
            final = [output async for output in outputs][-1]
        except VLLMClientError as error:
            raise EngineRejects(_first_line(error)) from error
        except EngineDeadError as error:
            raise _dead() from error
        except EngineGenerateError as error:
            if isinstance(error.__cause__, (ValueError, TypeError)):
                raise EngineRejects(_first_line(error.__cause__)) from error
            raise ServerError("vLLM failed to generate", code="E-SRV-12", why=repr(error.__cause__)) from error
        if final.outputs[0].finish_reason == "abort":
            raise ServerError("vLLM gave up a request", code="E-SRV-12", why="the engine aborted it")
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
            raise EngineRejects(_first_line(error)) from error
        finally:
            task.cancel()
        raise ServerError(f"vLLM did not answer within {CONTROL_TIMEOUT_S:.0f} s", code="E-SRV-05")


def _import_vllm() -> None:
    """The slow imports, in a call of their own: something keeps a traceback of them, frames and all. An engine made
    further down the same stack would stay alive with it and complain when the interpreter ends."""
    import vllm.engine.arg_utils
    import vllm.platforms
    import vllm.v1.engine.async_llm  # noqa: F401


def _start(settings: EngineSettings) -> tuple[AsyncLLM, Path, Fingerprint, set[Any]]:
    """Runs in the starter thread: everything slow, and everything that starts processes."""
    directory = local_model(settings)
    identity = fingerprint(settings.model, settings.revision, settings.trust_remote_code)
    go_offline()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    wanted = settings.device.partition(":")[0]
    if wanted != current_platform.device_type:
        raise EnvironmentFault(
            f"vllm.device: {settings.device}, but the installed vLLM runs on {current_platform.device_type}",
            code="E-ENV-03",
            do="install the vLLM build for this device, or set vllm.device or vllm.engine: transformers",
        )
    before = process_tree.children()
    try:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(settings, directory)))
    except Exception as error:
        process_tree.stop(process_tree.children() - before)
        raise EnvironmentFault(
            f"the vLLM engine failed to start with {settings.model}",
            code="E-ENV-05",
            why=_first_line(error),
            do="the engine's own log above has the details; vllm.engine: transformers is the way round it",
        ) from error
    return llm, Path(directory), identity, process_tree.children() - before


def _params_maker(sampling: Sampling) -> Callable[[int], SamplingParams]:
    """A function from a seed to the parameters of one completion; what is wrong with them is raised here, once."""
    from pydantic import TypeAdapter, ValidationError
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    fields = sampling_fields(sampling, SamplingParams.__struct_fields__)
    fields |= {"logprobs": 0, "flat_logprobs": True, "skip_clone": True}
    adapter = TypeAdapter(SamplingParams)

    def make(seed: int) -> SamplingParams:
        if not 0 <= seed <= LARGEST_SEED:
            raise EngineRejects(f"seed {seed} is not between 0 and {LARGEST_SEED}")
        try:
            params = adapter.validate_python({**fields, "seed": seed})
        except ValidationError as error:
            last = error.errors(include_url=False)[-1]
            raise EngineRejects(f"generation_kwargs.{_option(last['loc'])}: {last['msg']}") from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise EngineRejects(_first_line(error)) from error
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return params

    return make


def _completion(output: RequestOutput) -> Completion:
    result = output.outputs[0]
    flat: Any = result.logprobs
    assert len(flat.logprobs) == len(result.token_ids), (len(flat.logprobs), len(result.token_ids))
    return Completion(
        ids=list(result.token_ids),
        logprobs=[value if math.isfinite(value) else None for value in flat.logprobs],
        finish_reason="length" if result.finish_reason == "length" else "stop",
    )


def _option(location: tuple[int | str, ...]) -> str:
    """The option's name in a pydantic error location, which begins with names of pydantic's own."""
    from vllm.sampling_params import SamplingParams

    names = [str(part) for part in location]
    known = [index for index, name in enumerate(names) if name in SamplingParams.__struct_fields__]
    return ".".join(names[known[0] :] if known else names)


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
        code="E-SRV-10",
        why="its log has the reason (out of memory and a kernel that fails are the usual ones)",
        do="restart the server",
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
