"""The sender against a fake of vLLM's helper: the meeting of both sides, and who ends which wait."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.weight_sync.nccl import Announced, Library, NcclSender, TransferFailed
from axolotl.errors import SyncError
from axolotl.serving.transport import Lost
from axolotl.serving.wire import TRANSFER_CHUNK_BYTES, TRANSFER_NUM_CHUNKS, TransferRequest
from tests.fakes.nccl import Communicator, FakeNccl, TransferEngine

TRANSFER = TransferRequest.model_validate(
    {
        "run_id": "run-1",
        "version": 1,
        "sha256": "a" * 64,
        "tensors": [{"name": name, "dtype": "float32", "shape": [1]} for name in "abc"],
        "action": "receive",
    }
)


def encoded(number: int) -> str:
    """The id of the group that was made as number so."""
    return base64.b64encode(number.to_bytes(128, "big")).decode()


class Source:
    def metadata(self) -> list[Announced]:
        return [Announced(tensor.name, torch.float32, (1,)) for tensor in TRANSFER.tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter([(name, torch.zeros(1)) for name in "abc"])


class Link:
    """The server, as HTTP. fault: what `link` or `receive` raise. worker: its end of the group."""

    timeout_s = 20.0

    def __init__(self, nccl: FakeNccl) -> None:
        self.nccl = nccl
        self.fault: Exception | None = None
        self.worker: Communicator | None = None
        self.threads: list[str] = []
        self.asked: list[str] = []
        self.left: list[str] = []

    def link(self, unique_id: str) -> None:
        self.threads.append(threading.current_thread().name)
        self.asked.append(unique_id)
        if self.fault is not None:
            raise self.fault
        self.worker = self.nccl.join_worker(unique_id, 3)

    def receive(self, transfer: TransferRequest) -> Any:
        self.threads.append(threading.current_thread().name)
        if self.fault is not None:
            raise self.fault
        assert self.worker is not None
        for _ in transfer.tensors:
            self.worker.receive()
        return SimpleNamespace(num_modules=3)

    def leave(self, unique_id: str) -> None:
        self.left.append(unique_id)
        if self.worker is not None:
            self.worker.destroy()


@pytest.fixture
def nccl() -> Iterator[FakeNccl]:
    nccl = FakeNccl()
    yield nccl
    nccl.leave_waiting()


def connected(nccl: FakeNccl) -> tuple[NcclSender, Any]:
    sender, link = NcclSender(0, nccl.library), Link(nccl)
    sender.connect(link, 2)  # type: ignore[arg-type]
    return sender, link


def test_the_trainer_joins_while_another_thread_asks_the_server(nccl: FakeNccl) -> None:
    sender, link = connected(nccl)
    (group,) = nccl.communicators
    assert group.world_size == 3, "itself and two workers"
    assert sender.send(link, TRANSFER, Source()).num_modules == 3
    assert threading.current_thread().name not in link.threads and len(link.threads) == 2
    sender.close()
    assert group.is_destroyed


def test_both_sides_cut_the_tensors_into_the_same_pieces(nccl: FakeNccl) -> None:
    made: list[dict[str, Any]] = []

    class Engine(TransferEngine):
        def __init__(self, **options: Any) -> None:
            made.append(options)
            super().__init__(**options)

    library = nccl.library()
    sender, link = NcclSender(0, lambda: Library(library.new_id, library.join, Engine)), Link(nccl)
    sender.connect(link, 2)  # type: ignore[arg-type]
    sender.send(link, TRANSFER, Source())  # type: ignore[arg-type]
    (options,) = made
    assert (options["packed"], options["packed_buffer_size_bytes"]) == (True, TRANSFER_CHUNK_BYTES)
    assert options["packed_num_buffers"] == TRANSFER_NUM_CHUNKS
    sender.close()


def test_a_new_link_has_a_new_id_and_ends_the_old_one(nccl: FakeNccl) -> None:
    sender, link = connected(nccl)
    sender.connect(link, 2)
    old, new = nccl.communicators
    assert link.asked == [encoded(1), encoded(2)]
    assert old.is_destroyed and not new.is_destroyed
    sender.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Lost("does not answer"), "the server does not answer"),
        (SyncError("the workers could not join", code="E-SYN-14", why="invalid usage"), "join (invalid usage)"),
    ],
)
def test_a_server_that_cannot_be_asked_is_not_waited_for_in_nccl(nccl: FakeNccl, fault: Exception, reason: str) -> None:
    sender, link = NcclSender(0, nccl.library), Link(nccl)
    link.fault = fault
    with pytest.raises(TransferFailed) as caught:
        sender.connect(link, 2)  # type: ignore[arg-type]
    assert reason in str(caught.value)


def test_a_server_whose_workers_wait_is_told_that_the_trainer_could_not_join(nccl: FakeNccl) -> None:
    nccl.join_fault = RuntimeError("NCCL error: unhandled cuda error")
    sender, link = NcclSender(0, nccl.library), Link(nccl)
    with pytest.raises(TransferFailed, match="unhandled cuda error"):
        sender.connect(link, 2)  # type: ignore[arg-type]
    assert link.left == [encoded(1)]


def test_a_meeting_has_a_deadline_and_who_joins_too_late_leaves(nccl: FakeNccl) -> None:
    sender, link = NcclSender(0, nccl.library), Link(nccl)
    answered, left = threading.Event(), threading.Event()

    def late(unique_id: bytes, **_: Any) -> Any:
        assert answered.wait(20)
        return SimpleNamespace(destroy=left.set)

    library = nccl.library()
    sender = NcclSender(0, lambda: Library(library.new_id, late, TransferEngine))
    link.link = lambda unique_id: None  # type: ignore[method-assign]
    link.timeout_s = 0.05
    with pytest.raises(TransferFailed, match="did not find each other"):
        sender.connect(link, 2)  # type: ignore[arg-type]
    answered.set()
    assert left.wait(20)


@pytest.mark.parametrize("fault", [Lost("broke off"), SyncError("no", code="E-SYN-07")])
def test_a_server_that_fails_ends_the_broadcast(nccl: FakeNccl, fault: Exception) -> None:
    sender, link = connected(nccl)
    link.fault = fault
    with pytest.raises(TransferFailed):
        sender.send(link, TRANSFER, Source())
    assert nccl.communicators[0].is_destroyed and link.left == [], "it knows already"


def test_nothing_is_handed_to_a_communicator_that_was_aborted(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread waits in the first tensor until the abort wakes it."""
    sender, link = connected(nccl)
    group = nccl.communicators[0]
    handed: list[torch.Tensor] = []
    begun, aborted = threading.Event(), threading.Event()

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        handed.append(tensor)
        begun.set()
        assert aborted.wait(20)

    def receive(transfer: TransferRequest) -> None:
        assert begun.wait(20)
        raise Lost("broke off")

    monkeypatch.setattr(link, "receive", receive)
    monkeypatch.setattr(group, "broadcast", broadcast)
    monkeypatch.setattr(group, "destroy", aborted.set)
    with pytest.raises(TransferFailed, match="broke off"):
        sender.send(link, TRANSFER, Source())
    assert len(handed) == 1


def test_a_broadcast_that_fails_is_told_to_the_server(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, link = connected(nccl)

    def broken(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nccl.communicators[0], "broadcast", broken)
    with pytest.raises(TransferFailed, match="out of memory"):
        sender.send(link, TRANSFER, Source())
    assert link.left == [encoded(1)] and nccl.communicators[0].is_destroyed
