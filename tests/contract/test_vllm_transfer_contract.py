"""Every name of vLLM's weight transfer that we rely on, and our halves against its own code as far as it goes without a
GPU: the requests, the helper's order of calls, the tensors that it takes."""

from __future__ import annotations

import base64
import importlib.util
import inspect
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.weight_sync.nccl import Announced, NcclSender, TransferFailed, vllm_library
from axolotl.serving.engines.vllm_transfer import link_info, update_info
from axolotl.serving.wire import TRANSFER_CHUNK_BYTES, TRANSFER_NUM_CHUNKS, TransferRequest
from tests.fakes.nccl import Communicator, FakeNccl, TransferEngine

pytestmark = [
    pytest.mark.contract,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

UNIQUE_ID = base64.b64encode(bytes(range(128))).decode()
TRANSFER = TransferRequest.model_validate(
    {
        "run_id": "run-1",
        "version": 1,
        "sha256": "a" * 64,
        "tensors": [
            {"name": "a", "dtype": "bfloat16", "shape": [2, 3]},
            {"name": "b", "dtype": "float32", "shape": []},
        ],
        "action": "receive",
    }
)


class Source:
    def metadata(self) -> list[Announced]:
        return [Announced("a", torch.bfloat16, (2, 3)), Announced("b", torch.float32, ())]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2, 3, dtype=torch.bfloat16)
        yield "b", torch.tensor(1.0)


def test_the_engine_has_the_calls_we_make() -> None:
    """engines/vllm_transfer"""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    for name, parameters in {
        "init_weight_transfer_engine": {"request"},
        "shutdown_weight_transfer_engine": set(),
        "start_weight_update": set(),
        "update_weights": {"request"},
        "finish_weight_update": {"weight_version"},
    }.items():
        call = getattr(AsyncLLM, name)
        assert inspect.iscoroutinefunction(call)
        assert set(inspect.signature(call).parameters) == {"self", *parameters}, name
    assert [field.name for field in fields(WeightTransferInitRequest)] == ["init_info"]
    assert [field.name for field in fields(WeightTransferUpdateRequest)] == ["update_info"]


def test_what_the_workers_are_told_is_what_they_parse() -> None:
    """engines/vllm_transfer: unknown keys and ids that are no ids are refused by these classes themselves."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    told = NCCLWeightTransferInitInfo(**link_info(UNIQUE_ID, 2))
    assert told.nccl_unique_id_bytes == bytes(range(128))
    assert (told.rank_offset, told.world_size, told.packed) == (1, 3, True)
    assert told.master_address is None and told.master_port is None, "no store, so nothing is unpickled"
    assert (told.packed_buffer_size_bytes, told.packed_num_buffers) == (TRANSFER_CHUNK_BYTES, TRANSFER_NUM_CHUNKS)
    update = NCCLWeightTransferUpdateInfo(**update_info(TRANSFER.tensors))
    assert [getattr(torch, name) for name in update.dtype_names] == [torch.bfloat16, torch.float32]


def test_with_an_id_a_worker_meets_the_trainer_without_a_store() -> None:
    """engines/vllm_transfer: what comes through the store is unpickled."""
    from vllm.distributed.weight_transfer import nccl_common
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    source = inspect.getsource(nccl_common.worker_init_process_group)
    assert source.index("uid_init_process_group(") < source.index("stateless_init_process_group(")
    assert "worker_init_process_group(" in inspect.getsource(NCCLWeightTransferEngine.init_transfer_engine)


def test_the_engine_is_started_with_the_backend_by_name(tmp_path: Path) -> None:
    """vllm_arguments"""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert AsyncEngineArgs(model=str(tmp_path), weight_transfer_config={"backend": "nccl"}).weight_transfer_config == (
        WeightTransferConfig(backend="nccl")
    )
    assert "nccl" in WeightTransferEngineFactory._registry


def test_gpus_have_a_uuid() -> None:
    """vllm_start: asked of the driver, so that the front process touches no GPU."""
    from vllm.platforms import interface

    assert "device_id" in inspect.signature(interface.Platform.get_device_uuid).parameters
    # A CPU build cannot import it.
    cuda = Path(interface.__file__).with_name("cuda.py").read_text()
    assert "def get_device_uuid(cls, device_id: int = 0) -> str:" in cuda and "nvmlDeviceGetUUID(handle)" in cuda


def test_the_fake_helper_has_the_signatures_of_vllms() -> None:
    """tests/fakes/nccl, weight_sync/nccl"""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    def names(call: Any) -> list[str]:
        return list(inspect.signature(call).parameters)

    library = vllm_library()
    assert names(library.join) == names(FakeNccl().join_trainer)
    assert names(library.engine) == names(TransferEngine) and library.engine is NCCLTrainerWeightTransferEngine
    assert names(NCCLTrainerWeightTransferEngine.send_weights) == names(TransferEngine.send_weights)
    assert "self.model_update_group" in inspect.getsource(NCCLTrainerWeightTransferEngine.__init__)
    assert names(PyNcclCommunicator.broadcast) == names(Communicator.broadcast)
    assert names(PyNcclCommunicator.destroy) == names(Communicator.destroy)
    assert NCCL_UNIQUE_ID_BYTES == 128 == len(bytes(inspect.signature(NCCLLibrary.ncclGetUniqueId).return_annotation()))


def test_destroying_a_communicator_aborts_it() -> None:
    """weight_sync/nccl: what waits in it returns, and what comes later does nothing."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    source = inspect.getsource(PyNcclCommunicator.destroy)
    assert "ncclCommAbort" in source and "self.disabled = True" in source
    assert "if self.disabled:\n            return" in inspect.getsource(PyNcclCommunicator.broadcast)


class Link:
    """The server, as HTTP."""

    timeout_s = 20.0

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fault: Exception | None = None

    def link(self, unique_id: str) -> None:
        self.calls.append(("link", unique_id))

    def receive(self, transfer: TransferRequest) -> str:
        self.calls.append(("receive", threading.current_thread().name))
        if self.fault is not None:
            raise self.fault
        return "served"

    def leave(self, unique_id: str) -> None:
        self.calls.append(("leave", unique_id))


class Group:
    def __init__(self) -> None:
        self.is_destroyed = threading.Event()

    def destroy(self) -> None:
        self.is_destroyed.set()


def real_sender(monkeypatch: pytest.MonkeyPatch) -> tuple[NcclSender, Any, Group, list[str]]:
    """Ours over vLLM's own helper. Only its broadcast is replaced, by its own check of what it is given."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine as Helper

    group, sent = Group(), []

    def broadcast(self: Any, source: Any, meta: Any) -> None:
        assert self.model_update_group is group
        sent.extend(name for name, _ in self._checked_iter(source, meta))

    monkeypatch.setattr(Helper, "_broadcast", broadcast)
    library = vllm_library()
    made = type(library)(new_id=lambda: bytes(128), join=lambda *_, **__: group, engine=library.engine)
    sender, link = NcclSender(0, lambda: made), Link()
    sender.connect(link, 2)  # type: ignore[arg-type]
    return sender, link, group, sent


def test_vllms_helper_drives_our_half(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, link, group, sent = real_sender(monkeypatch)
    assert sender.send(link, TRANSFER, Source()) == "served"  # type: ignore[comparison-overlap]
    assert sent == ["a", "b"]
    assert [name for name, _ in link.calls] == ["link", "receive"]
    assert link.calls[1][1] != threading.current_thread().name, "the server is asked beside the broadcast"
    sender.close()
    assert group.is_destroyed.is_set()


def test_vllms_helper_hands_on_what_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, link, group, _ = real_sender(monkeypatch)
    link.fault = RuntimeError("the server broke")
    with pytest.raises(TransferFailed, match="the server broke"):
        sender.send(link, TRANSFER, Source())
    assert group.is_destroyed.is_set()


def test_vllms_helper_refuses_tensors_that_were_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.ones(2, 3)

    sender, link, group, _ = real_sender(monkeypatch)
    with pytest.raises(TransferFailed, match="disagrees"):
        sender.send(link, TRANSFER, Other())
    assert link.calls[-1][0] == "leave" and group.is_destroyed.is_set()
