"""vLLM's trainer-side half of a weight transfer. Of all that trains, only this module names vLLM.

    main thread      join the group ─────┐      broadcast, tensor by tensor ──────┐
    thread of HTTP   POST /link_weights/ ┴ ok   POST /receive_weights/ ───────────┴ served

The communicator belongs to the main thread; the two halves meet inside NCCL, which knows no deadline. What ends a wait
there is an abort of the communicator, the one call of NCCL that is meant to come from another thread: the thread of
HTTP makes it when the server has failed, and it is the only thing of NCCL that this thread does. Before that it stops
the stream of tensors, so that the main thread, when it wakes, has nothing more to hand to an aborted communicator.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from axolotl.core.trainers.grpo.weight_sync.merged import Named
from axolotl.errors import AxolotlError
from axolotl.serving.transport import Lost
from axolotl.serving.weight_link import WeightLink
from axolotl.serving.wire import (
    TRANSFER_CHUNK_BYTES,
    TRANSFER_NUM_CHUNKS,
    AdapterResponse,
    TransferRequest,
)

T = TypeVar("T")


class TransferFailed(Exception):
    """NCCL cannot be used, or cannot be used any more. The text says why."""


@dataclass(frozen=True)
class Announced:
    """One tensor to come, as vLLM's helper reads it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(Protocol):
    """The tensors of a version, as vLLM's helper reads them: `metadata` and each iteration name the same ones."""

    def metadata(self) -> list[Announced]: ...

    def __iter__(self) -> Iterator[Named]: ...


class Group(Protocol):
    """A communicator of vLLM's. destroy: aborts it, from any thread; what waits in it returns."""

    def destroy(self) -> None: ...


@dataclass(frozen=True)
class Library:
    """What is used of vLLM. new_id: 128 bytes. join: the group with this id, as a rank of so many, on a GPU."""

    new_id: Callable[[], bytes]
    join: Callable[..., Group]
    engine: Callable[..., Any]


def vllm_library() -> Library:
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    return Library(
        new_id=lambda: bytes(NCCLLibrary().ncclGetUniqueId()),
        join=uid_init_process_group,
        engine=NCCLTrainerWeightTransferEngine,
    )


class NcclSender:
    """A `Sender` (see `direct.py`) from one GPU. library: vLLM's, imported on first use; given in tests."""

    def __init__(self, device: int, library: Callable[[], Library] = vllm_library) -> None:
        self._device = device
        self._library = library
        self._group: Group | None = None
        self._unique_id = ""

    def connect(self, link: WeightLink, num_workers: int) -> None:
        """Join a new group with the server's workers. Raises `TransferFailed`."""
        self.close()
        try:
            library = self._library()
            raw = library.new_id()
            unique_id = self._unique_id = base64.b64encode(raw).decode()
            joining = _in_thread(
                "nccl-join",
                lambda: library.join(raw, rank=0, world_size=1 + num_workers, device=self._device),
            )
            asking = _in_thread("nccl-link", lambda: link.link(unique_id))
            self._group = _both(joining, asking, link, unique_id)
        except Exception as error:
            raise TransferFailed(_reason(error)) from error

    def send(self, link: WeightLink, transfer: TransferRequest, source: Source) -> AdapterResponse:
        """Send what was announced and checked; returns when it is served. Raises `TransferFailed`."""
        assert self._group is not None, "connect first"
        control = _Control(link, transfer, self._group)
        try:
            engine = self._library().engine(
                client=control,
                source=_Until(control.failed, source),
                packed=True,
                packed_buffer_size_bytes=TRANSFER_CHUNK_BYTES,
                packed_num_buffers=TRANSFER_NUM_CHUNKS,
            )
            engine.model_update_group = self._group
            engine.send_weights()
        except Exception as error:
            # Asked first: the server fails too once the group is gone, which is not the reason.
            theirs = control.problem
            self.close()
            if theirs is None:
                _leave(link, self._unique_id)
            raise TransferFailed(_reason(theirs or error)) from error
        assert control.answer is not None, "vLLM's helper asks the server, and waits for its answer"
        return control.answer

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.destroy()


class _Control:
    """The server as vLLM's helper calls it: `update_weights` in a thread of the helper's, while it broadcasts."""

    def __init__(self, link: WeightLink, transfer: TransferRequest, group: Group) -> None:
        self._link = link
        self._transfer = transfer
        self._group = group
        self.answer: AdapterResponse | None = None
        self.problem: Exception | None = None
        self.failed = threading.Event()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        raise AssertionError("the group was joined before")

    def start_weight_update(self) -> None:
        """The server does it with the rest, so that no half of an update is ever open between two requests."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            assert update_info["names"] == [tensor.name for tensor in self._transfer.tensors]
            self.answer = self._link.receive(self._transfer)
        except Exception as problem:
            self.problem = problem
            self.failed.set()
            self._group.destroy()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """As `start_weight_update`."""


class _Until:
    """A `Source` that ends with an error once `failed` is set."""

    def __init__(self, failed: threading.Event, source: Source) -> None:
        self._failed = failed
        self._source = source

    def metadata(self) -> list[Announced]:
        return self._source.metadata()

    def __iter__(self) -> Iterator[Named]:
        for item in self._source:
            if self._failed.is_set():
                raise TransferFailed("the server has failed")
            yield item


def _in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """A thread that the end of the process does not wait for: NCCL may never return to it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _both(joining: Future[Group], asking: Future[None], link: WeightLink, unique_id: str) -> Group:
    """The group, once both sides are in it."""
    halves: list[Future[Any]] = [asking, joining]
    wait(halves, link.timeout_s, FIRST_EXCEPTION)
    problem = next((half.exception() for half in halves if half.done() and half.exception() is not None), None)
    if problem is None and all(half.done() for half in halves):
        return joining.result()
    joining.add_done_callback(_left)
    if not asking.done():
        _leave(link, unique_id)
    raise problem or TransferFailed(f"trainer and server did not find each other within {link.timeout_s:.0f} s")


def _leave(link: WeightLink, unique_id: str) -> None:
    """The server waits for what will not come."""
    with suppress(Lost, AxolotlError):
        link.leave(unique_id)


def _left(joining: Future[Group]) -> None:
    """Whoever joins too late leaves."""
    if joining.exception() is None:
        joining.result().destroy()


def _reason(error: BaseException) -> str:
    if isinstance(error, Lost):
        return f"the server {error.reason}"
    text = str(error) or type(error).__name__
    why = error.why if isinstance(error, AxolotlError) and error.why else ""
    return (f"{text} ({why})" if why else text).splitlines()[0]
