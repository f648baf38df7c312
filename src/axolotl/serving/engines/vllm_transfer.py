"""Full weights from the trainer over NCCL, by vLLM's own weight-transfer engine.

    link      each worker joins the trainer's group, behind rank 0
    receive   quiet ─► pause ─► start ─► update: blocks in NCCL until the trainer has sent all of it ─► finish ─► resume

The workers do the NCCL; this module only asks them to. vLLM would also take the address of a store in the trainer to
meet at, but what it reads from there it unpickles. The group's id over our own, authenticated HTTP needs no store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from axolotl.errors import ServerError
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.vllm_calls import Calls
from axolotl.serving.engines.weight_files import Shape
from axolotl.serving.wire import TRANSFER_CHUNK_BYTES, TRANSFER_NUM_CHUNKS, TensorLayout

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Model(Protocol):
    """The engine's weights, as `VLLMEngine` guards them."""

    def check_layout(self, shapes: Mapping[str, Shape]) -> None: ...

    def quiet(self) -> AbstractAsyncContextManager[None]: ...

    async def replace_weights(
        self, version: int, load: Callable[[], Awaitable[None]], *, hidden: Path | None = None
    ) -> None: ...


class TransferReceiver:
    """`WeightReceiver` over vLLM. Event loop only."""

    def __init__(self, llm: AsyncLLM, calls: Calls, model: Model, ranks: tuple[str, ...]) -> None:
        self.ranks = ranks
        self._llm = llm
        self._calls = calls
        self._model = model
        self.is_linked = False

    async def link(self, unique_id: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=link_info(unique_id, len(self.ranks)))
        async with self._model.quiet():
            await self.unlink()
            try:
                await self._calls.control(self._llm.init_weight_transfer_engine(request))
            except EngineRejects:
                raise
            except BaseException as error:
                self._give_up("vLLM's workers did not join the trainer", error)
                raise
            self.is_linked = True

    async def unlink(self) -> None:
        """Leave the group, if there is one. It is quiet."""
        if self.is_linked:
            self.is_linked = False
            await self._calls.control(self._llm.shutdown_weight_transfer_engine())

    def check(self, tensors: Sequence[TensorLayout]) -> None:
        shapes = {tensor.name: tuple(tensor.shape) for tensor in tensors}
        if len(shapes) != len(tensors):
            raise EngineRejects("a tensor is announced twice")
        self._model.check_layout(shapes)

    async def receive(self, version: int, tensors: Sequence[TensorLayout]) -> int:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        assert self.is_linked
        self.check(tensors)
        llm, control = self._llm, self._calls.control
        update = WeightTransferUpdateRequest(update_info=update_info(tensors))

        async def load() -> None:
            await control(llm.start_weight_update())
            await control(llm.update_weights(update))
            await control(llm.finish_weight_update())

        try:
            await self._model.replace_weights(version, load)
        except BaseException as error:
            # Also where nothing was overwritten yet: the trainer sends already, and its half would wait for ever.
            self._give_up("the transfer of weights broke off", error)
            raise
        return len(tensors)

    def _give_up(self, what: str, error: BaseException) -> None:
        self.is_linked = False
        if not isinstance(error, ServerError):
            why = (str(error) or type(error).__name__).splitlines()[0]
            error = ServerError(what, code="E-SRV-23", why=why, do="restart the server")
        self._calls.fail(error)


def link_info(unique_id: str, num_workers: int) -> dict[str, Any]:
    """What vLLM's `NCCLWeightTransferInitInfo` is made of. The trainer is rank 0 and alone on its side."""
    return {
        "nccl_unique_id_b64": unique_id,
        "rank_offset": 1,
        "world_size": 1 + num_workers,
        "packed": True,
        "packed_buffer_size_bytes": TRANSFER_CHUNK_BYTES,
        "packed_num_buffers": TRANSFER_NUM_CHUNKS,
    }


def update_info(tensors: Sequence[TensorLayout]) -> dict[str, Any]:
    """What vLLM's `NCCLWeightTransferUpdateInfo` is made of."""
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [tensor.dtype for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }
