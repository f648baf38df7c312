"""Full weights from GPU to GPU, without files: survey and copy ─► link, once a server process ─► check ─► send.

What goes wrong                               What follows
the server is lost before anything is sent    this version goes over files, after the usual pause
the link or a transfer fails                  this version and all later ones of the run go over files: the server's
                                              engine was given up and started again, and NCCL is not trusted twice
the server is lost after it was served        whoever notices publishes the copy in host memory as files
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from axolotl.core.trainers.grpo.weight_sync.delivery import Delivered, check_reached
from axolotl.core.trainers.grpo.weight_sync.full_weights import FullWeights, narrowed, served_dtype
from axolotl.core.trainers.grpo.weight_sync.host_copy import HostCopy
from axolotl.core.trainers.grpo.weight_sync.merged import Named, policy_weights
from axolotl.core.trainers.grpo.weight_sync.nccl import Announced, Source, TransferFailed
from axolotl.core.trainers.grpo.weight_sync.publish import remove_others
from axolotl.errors import ServerError, SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.transport import Lost
from axolotl.serving.weight_link import WeightLink
from axolotl.serving.wire import AdapterResponse, TensorLayout, TransferRequest


class Sender(Protocol):
    """Moves tensors to the server's workers. Main thread. Both calls raise `TransferFailed`, and only that."""

    def connect(self, link: WeightLink, num_workers: int) -> None:
        """Get together with the workers of the server's present process; leaves those of an earlier one."""
        ...

    def send(self, link: WeightLink, transfer: TransferRequest, source: Source) -> AdapterResponse:
        """Send `source` to them; returns when the server serves it."""
        ...

    def close(self) -> None: ...


class DirectWeights:
    """A `Delivery` over a `Sender`. Memory: the weights once in host memory, one layer beyond the model on the GPU.

    policy, directory: as of `FullWeights`, which is used when files are. NCCL is the main thread's alone; a recovery,
    which any thread may make, does HTTP and reads the copy in host memory.
    """

    has_adapter = False

    def __init__(self, policy: Callable[[], nn.Module], client: ServerClient, directory: Path, sender: Sender) -> None:
        self._policy = policy
        self._client = client
        self._directory = directory
        self._sender: Sender | None = sender
        self._files = FullWeights(policy, client, directory)
        self._copy = HostCopy()
        self._link = client.weight_link(self._publish)
        self._linked_to: str | None = None

    def connect(self, *, is_required: bool) -> None:
        """Link before anything is trained. Where that fails, files take over, or it is an error.

        Raises:
            SyncError: `E-SYN-14` it `is_required`.
        """
        assert self._sender is not None
        try:
            self._connect(self._sender)
        except TransferFailed as failed:
            if is_required:
                raise SyncError(
                    "trainer and server cannot be linked over NCCL",
                    code="E-SYN-14",
                    why=str(failed),
                    do="NCCL_DEBUG=INFO on both sides says more; set trl.weight_sync: files to go on without",
                ) from failed
            self._distrust(failed)

    def deliver(self, version: int) -> Delivered:
        """Send all weights as they are now as `version` and return when the server serves them.

        Raises:
            SyncError: the server refused the weights or confirmed something else.
            NumericError: they are not finite.
        """
        if self._sender is None:
            return self._files.deliver(version)
        started = time.perf_counter()
        self._link.forget()
        layout, digest = self._copy.take(version, self._weights())
        transfer = TransferRequest(
            run_id=self._link.run_id, version=version, sha256=digest, tensors=layout, action="receive"
        )
        copied = time.perf_counter()
        try:
            answer = self._transfer(self._sender, transfer)
        except Lost as lost:
            return self._over_files(version, f"the server {lost.reason}")
        except ServerError as error:
            # It may have forgotten this run. If it is another run's by now, the claim says so.
            return self._over_files(version, error.what)
        except TransferFailed as failed:
            self._distrust(failed)
            return self._over_files(version, "the transfer failed")
        check_reached(answer.num_modules, len(layout), f"weights version {version}")
        self._link.confirm(transfer)
        remove_others(self._directory, ())
        return Delivered(save_s=copied - started, load_s=time.perf_counter() - copied, digest=digest)

    def _transfer(self, sender: Sender, transfer: TransferRequest) -> AdapterResponse:
        if self._linked_to != self._client.info.instance_id:
            self._connect(sender)
        try:
            self._link.check(transfer)
        except SyncError as error:
            # A claim drops the link with everything else.
            if error.code != "E-SYN-13":
                raise
            self._connect(sender)
            self._link.check(transfer)
        return sender.send(self._link, transfer, _Weights(transfer.tensors, self._weights))

    def _connect(self, sender: Sender) -> None:
        info = self._client.info
        if not info.weight_ranks:
            raise TransferFailed("the server that is there now takes files only")
        sender.connect(self._link, len(info.weight_ranks))
        self._linked_to = info.instance_id

    def _distrust(self, failed: TransferFailed) -> None:
        self._link.say(f"warning: weights go over files from now on, NCCL failed: {failed}")
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def _over_files(self, version: int, why: str) -> Delivered:
        """Whatever became of the transfer, the server starts from the base model again."""
        self._link.say(f"weights version {version} goes over files: {why}")
        self._client.claim_again()
        return self._files.deliver(version)

    def _publish(self, version: int) -> str:
        return self._copy.publish(version, self._directory, self._served())

    def _weights(self) -> Iterator[Named]:
        served = self._served()
        for name, tensor in policy_weights(self._policy()):
            yield name, narrowed(tensor, served)

    def _served(self) -> torch.dtype:
        return served_dtype(self._client.info.dtype)


class _Weights:
    """A `Source`: the tensors are made again, one layer at a time, as often as it is read."""

    def __init__(self, layout: list[TensorLayout], weights: Callable[[], Iterator[Named]]) -> None:
        self._layout = layout
        self._weights = weights

    def metadata(self) -> list[Announced]:
        return [Announced(item.name, served_dtype(item.dtype), tuple(item.shape)) for item in self._layout]

    def __iter__(self) -> Iterator[Named]:
        return self._weights()
