"""The server's half of a transfer, in an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from axolotl.errors import ServerError
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import TensorLayout
from tests.fakes.nccl import Communicator, FakeNccl


class FakeReceiver:
    """A `WeightReceiver` of one worker. received: what came under each version, by name.

    link_fault: raised instead of joining. refusal: raised by `check`. breaks_after: the engine breaks when so many
    tensors have come. linking, started: set when `link` and `receive` begin. broken: set when the engine was given up.
    """

    ranks = ("GPU-1111",)

    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl
        self._group: Communicator | None = None
        self.received: dict[int, dict[str, torch.Tensor]] = {}
        self.num_links = 0
        self.link_fault: Exception | None = None
        self.refusal: EngineRejects | None = None
        self.breaks_after: int | None = None
        self.linking = asyncio.Event()
        self.started = asyncio.Event()
        self.broken = asyncio.Event()

    @property
    def is_linked(self) -> bool:
        return self._group is not None

    def unlink(self) -> None:
        if self._group is not None:
            self._group.destroy()
        self._group = None

    async def link(self, unique_id: str) -> None:
        self.unlink()
        if self.link_fault is not None:
            raise self.link_fault
        self.linking.set()
        try:
            self._group = await asyncio.to_thread(self._nccl.join_worker, unique_id, 1 + len(self.ranks))
        except asyncio.CancelledError:
            self.broken.set()
            raise
        self.num_links += 1

    def check(self, tensors: Sequence[TensorLayout]) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def receive(self, version: int, tensors: Sequence[TensorLayout]) -> int:
        assert self._group is not None
        group = self._group
        self.started.set()
        try:
            self.received[version] = await asyncio.to_thread(self._read, group, tensors)
        except BaseException:
            self.unlink()
            self.broken.set()
            raise
        return len(tensors)

    def _read(self, group: Communicator, tensors: Sequence[TensorLayout]) -> dict[str, torch.Tensor]:
        found = {}
        for count, layout in enumerate(tensors):
            if count == self.breaks_after:
                raise ServerError("the engine failed to replace its weights", code="E-SRV-23", why="w")
            tensor = group.receive()
            assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{layout.dtype}", layout.shape)
            found[layout.name] = tensor
        return found
