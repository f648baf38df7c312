"""NCCL between a trainer and a server of one test, and vLLM's trainer-side helper over it.

Like NCCL it knows no deadline and no other side: whoever waits in it does so until the other comes, or until its own
communicator is aborted. `tests/contract/test_vllm_transfer_contract.py` holds the names and signatures against vLLM.
"""

from __future__ import annotations

import base64
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from axolotl.core.trainers.grpo.weight_sync.nccl import Library

POLL_S = 0.005
DEADLINE_S = 20.0


class Aborted(Exception):
    """The communicator was destroyed while somebody waited in it."""


@dataclass
class UpdateInfo:
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Communicator:
    """One side's end of a group. sent: what the trainer has broadcast, in order."""

    def __init__(self, wire: queue.Queue[torch.Tensor], world_size: int) -> None:
        self._wire = wire
        self._destroyed = threading.Event()
        self.world_size = world_size
        self.sent: list[torch.Tensor] = []

    @property
    def is_destroyed(self) -> bool:
        return self._destroyed.is_set()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Returns when the other side has it; at once, and without it, after `destroy`."""
        assert src == 0
        while not self.is_destroyed:
            try:
                self._wire.put(tensor.clone(), timeout=POLL_S)
                self.sent.append(tensor)
                return
            except queue.Full:
                continue

    def receive(self) -> torch.Tensor:
        while not self.is_destroyed:
            try:
                return self._wire.get(timeout=POLL_S)
            except queue.Empty:
                continue
        raise Aborted

    def destroy(self) -> None:
        self._destroyed.set()


class FakeNccl:
    """join_fault: raised where the trainer joins. communicators: the trainer's ends, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_ids = 0
        self._meetings: dict[bytes, tuple[threading.Barrier, queue.Queue[torch.Tensor]]] = {}
        self.communicators: list[Communicator] = []
        self.join_fault: Exception | None = None

    def new_id(self) -> bytes:
        self._num_ids += 1
        return self._num_ids.to_bytes(128, "big")

    def join_trainer(self, nccl_unique_id_bytes: bytes, rank: int, world_size: int, device: Any) -> Communicator:
        assert rank == 0
        if self.join_fault is not None:
            raise self.join_fault
        communicator = self._join(nccl_unique_id_bytes, world_size)
        self.communicators.append(communicator)
        return communicator

    def join_worker(self, unique_id: str, world_size: int) -> Communicator:
        return self._join(base64.b64decode(unique_id, validate=True), world_size)

    def library(self) -> Library:
        return Library(new_id=self.new_id, join=self.join_trainer, engine=TransferEngine)

    def _join(self, unique_id: bytes, world_size: int) -> Communicator:
        with self._lock:
            barrier, wire = self._meetings.setdefault(unique_id, (threading.Barrier(2), queue.Queue(maxsize=1)))
        barrier.wait(DEADLINE_S)
        return Communicator(wire, world_size)

    def leave_waiting(self) -> None:
        """Nobody who waits for the other side goes on waiting."""
        for barrier, _ in self._meetings.values():
            barrier.abort()


class TransferEngine:
    """As vLLM's `NCCLTrainerWeightTransferEngine`: the server is asked in a thread while this one broadcasts, and that
    thread is not waited for when the broadcast raises."""

    def __init__(
        self,
        *,
        client: Any,
        source: Any,
        is_sender: bool = True,
        packed: bool = True,
        packed_buffer_size_bytes: int = 0,
        packed_num_buffers: int = 0,
    ) -> None:
        self.client = client
        self.source = source
        self.model_update_group: Any = None

    def send_weights(self) -> None:
        meta = self.source.metadata()
        update = UpdateInfo(
            names=[item.name for item in meta],
            dtype_names=[str(item.dtype).split(".")[-1] for item in meta],
            shapes=[list(item.shape) for item in meta],
        )
        self.client.start_weight_update()
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            future = executor.submit(self.client.update_weights, asdict(update))
            for tensor in self._checked(meta):
                self.model_update_group.broadcast(tensor, src=0)
            future.result()
        finally:
            executor.shutdown(wait=False)
        self.client.finish_weight_update()

    def _checked(self, meta: list[Any]) -> Iterator[torch.Tensor]:
        for item, (name, tensor) in zip(meta, self.source, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (item.name, item.dtype, item.shape)
            yield tensor
