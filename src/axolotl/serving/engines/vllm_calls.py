"""Every call into vLLM's engine: requests and control calls, in our own errors, and what its death does to both."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from axolotl.errors import ServerError
from axolotl.serving.engines import process_tree
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.vllm_requests import engine_reason, first_line

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

#: How often a control call looks whether the engine still lives; vLLM never answers a call whose engine died.
ALIVE_CHECK_S = 0.5


class Calls:
    """Event loop only.

    work: the engine's counter of tokens. stall_s: how long it may stand still under a control call.

    era: goes up with every `abort_all`. A request says in which era it was made; one that comes later never reaches the
    engine, where its adapter may be gone. reloading: grows while a reload of weights is at work.
    """

    def __init__(
        self, llm: AsyncLLM, processes: Collection[psutil.Process], work: Callable[[], int], *, stall_s: float
    ) -> None:
        self._llm = llm
        self._processes = processes
        self._work = work
        self._stall_s = stall_s
        self._ids = itertools.count()
        self._running: set[str] = set()
        self._fault: ServerError | None = None
        self._faulted = asyncio.Event()
        self.era = 0
        self.reloading = 0

    def check(self, params: SamplingParams) -> None:
        """Raise `EngineRejects` for what vLLM would refuse; its engine processes are not asked."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input

        try:
            self._llm.input_processor.process_inputs(
                "check", tokens_input([0]), params.clone(), supported_tasks=("generate",)
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            raise EngineRejects(first_line(error)) from error

    async def request(
        self, prompt: Sequence[int], params: SamplingParams, adapter: LoRARequest | None, era: int
    ) -> RequestOutput:
        """One request to its end. Cancelling the task aborts it in the engine."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self._fault is not None:
            raise self._fault
        if era != self.era:
            raise _given_up()
        request_id = f"r{next(self._ids)}"
        self._running.add(request_id)
        try:
            outputs = self._llm.generate(tokens_input(list(prompt)), params, request_id, lora_request=adapter)
            final = [output async for output in outputs][-1]
        except VLLMClientError as error:
            raise EngineRejects(first_line(error)) from error
        except EngineDeadError as error:
            raise dead() from error
        except EngineGenerateError as error:
            if isinstance(error.__cause__, (ValueError, TypeError)):
                raise EngineRejects(first_line(error.__cause__)) from error
            raise ServerError("vLLM failed to generate", code="E-SRV-21", why=repr(error.__cause__)) from error
        finally:
            self._running.discard(request_id)
        if final.outputs[0].finish_reason == "abort":
            raise _given_up()
        return final

    async def abort_all(self) -> None:
        """End every request there is; each raises `ServerError`."""
        self.era += 1
        if self._running:
            await self._llm.abort(list(self._running))

    async def control(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a control call of the engine (an adapter, a cache reset), and notice when the engine dies under it.

        Under load it waits for the engine's steps, for as long as they make tokens.
        """
        before = self._work()

        def is_moving() -> bool:
            nonlocal before
            last, before = before, self._work()
            return before > last

        return await self._watched(call, is_moving, self._stall_s)

    async def reload(self, call: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """The same for a reload of weights, within `timeout_s`. It makes no tokens, but the engine's processes compute:
        whoever waits for it sees `reloading` grow."""
        before = process_tree.cpu_seconds(self._processes)

        def note() -> bool:
            nonlocal before
            last, before = before, process_tree.cpu_seconds(self._processes)
            self.reloading += before > last
            return False

        return await self._watched(call, note, timeout_s)

    async def _watched(self, call: Coroutine[Any, Any, T], is_moving: Callable[[], bool], timeout_s: float) -> T:
        """is_moving: asked every `ALIVE_CHECK_S`; the timeout counts from when it last was."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._fault is not None:
            call.close()
            raise self._fault
        clock = asyncio.get_running_loop().time
        task = asyncio.ensure_future(call)
        moved_at = clock()
        try:
            while clock() - moved_at < timeout_s:
                done, _pending = await asyncio.wait({task}, timeout=ALIVE_CHECK_S)
                if done:
                    return task.result()
                if self._llm.errored or self._llm.engine_core.resources.engine_dead:
                    raise dead()
                if is_moving():
                    moved_at = clock()
        except EngineDeadError as error:
            raise dead() from error
        except (ServerError, EngineRejects, asyncio.CancelledError):
            raise
        except Exception as error:
            # vLLM hands back what its engine raised as the text of a plain Exception; the engine goes on.
            raise EngineRejects(engine_reason(error)) from error
        finally:
            task.cancel()
        raise ServerError(f"vLLM did not answer within {timeout_s:.0f} s", code="E-SRV-05")

    def fail(self, fault: ServerError) -> None:
        """From here on the engine must not be used: every call raises `fault`, and `died` returns."""
        self._fault = fault
        self._faulted.set()

    async def died(self, processes: Collection[psutil.Process]) -> str:
        """The reason, once one of `processes` ended, vLLM gave its engine up, or `fail` was called."""
        handler = self._llm.output_handler
        assert handler is not None, "vLLM makes it with the first request"
        names = {process: process_tree.name(process) for process in processes}
        exited = asyncio.ensure_future(process_tree.first_exit(processes))
        faulted = asyncio.ensure_future(self._faulted.wait())
        try:
            await asyncio.wait({exited, faulted, handler}, return_when=asyncio.FIRST_COMPLETED)
            if self._fault is not None:
                return f"{self._fault.what}: {self._fault.why}"
            if not exited.done():
                # vLLM reads the end of its engine from a socket; the process itself takes a moment longer to end.
                await asyncio.wait({exited}, timeout=1)
            if exited.done():
                # Several, when one took the others with it before this loop had its turn.
                ended = [process for process in names if not process_tree.is_alive(process)]
                return f"{' and '.join(f'{names[process]} (pid {process.pid})' for process in ended)} ended"
            return "vLLM stopped reading from its engine"
        finally:
            exited.cancel()
            faulted.cancel()


def dead() -> ServerError:
    return ServerError(
        "the vLLM engine process died",
        code="E-SRV-20",
        why="its log has the reason (out of memory and a kernel that fails are the usual ones)",
        do="restart the server",
    )


def _given_up() -> ServerError:
    return ServerError("vLLM gave up a request", code="E-SRV-21", why="the engine aborted it")
