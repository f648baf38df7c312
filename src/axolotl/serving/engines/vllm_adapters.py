"""The adapters that vLLM holds: one name, id and path for every version, each loaded before it is asked for."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axolotl.errors import ServerError
from axolotl.serving.engines.adapter_shapes import Shape, check_shapes
from axolotl.serving.engines.lora import read_adapter
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.vllm_calls import Calls

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class AdapterSlots:
    """One caller at a time. max_rank: None where vLLM was started without adapters."""

    def __init__(
        self, llm: AsyncLLM, calls: Calls, base: dict[str, Shape], *, max_rank: int | None, num_slots: int
    ) -> None:
        self._llm = llm
        self._calls = calls
        self._base = base
        self._max_rank = max_rank
        self._num_slots = num_slots
        self._held: dict[int, LoRARequest] = {}

    @property
    def versions(self) -> list[int]:
        return sorted(self._held)

    def get(self, version: int) -> LoRARequest | None:
        return self._held.get(version)

    async def load(self, version: int, directory: Path) -> int:
        """See `Engine.load_adapter`."""
        from vllm.lora.request import LoRARequest

        if self._max_rank is None:
            raise EngineRejects("this server was started without an adapter in its config, so it can load none")
        if version in self._held:
            raise EngineRejects(f"adapter version {version} is already loaded; every version is loaded once")
        if len(self._held) >= self._num_slots:
            raise EngineRejects(f"no free adapter slot: versions {self.versions} are loaded, unload one first")
        modules = await asyncio.to_thread(read_adapter, directory, max_rank=self._max_rank)
        check_shapes(modules, self._base)
        request = LoRARequest(f"policy-v{version}", version, str(directory))
        # What may be in the engine counts as held until it is known to be gone: vLLM keeps the old weights when an id
        # that it still has is loaded again.
        self._held[version] = request
        try:
            await self._add(request)
        except EngineRejects as error:
            await self.unload(version)
            # The text travels to the client, who is told no paths of this machine.
            raise EngineRejects(str(error).replace(str(directory), "the adapter")) from error
        except ServerError:
            with suppress(ServerError, EngineRejects):
                await self.unload(version)
            raise
        return len(modules)

    async def _add(self, request: LoRARequest) -> None:
        """Load an adapter, and ask every worker for modules of it that found no layer; vLLM serves such an adapter
        silently. Both are sent at once: under load the engine answers calls between two steps only."""
        version = request.lora_int_id
        answers: tuple[Any, Any] = await asyncio.gather(
            self._calls.control(self._llm.add_lora(request)),
            self._calls.control(self._llm.collective_rpc("axolotl_unreached_modules", args=(version,))),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        for unreached in answers[1]:
            if unreached is None:
                raise EngineRejects(f"adapter version {version} was not kept by the engine")
            if unreached:
                shown = ", ".join(unreached[:3])
                raise EngineRejects(f"{len(unreached)} modules of the adapter are not in the model: {shown}")

    async def unload(self, version: int) -> None:
        if version in self._held:
            await self._calls.control(self._llm.remove_lora(version))
            del self._held[version]

    async def unload_all(self) -> None:
        for version in self.versions:
            await self.unload(version)
