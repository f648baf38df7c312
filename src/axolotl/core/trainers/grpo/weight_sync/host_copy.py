"""A policy version in host memory: what was sent over NCCL is on no disk, and the model trains on.

It is what a server that was restarted is given: read by any thread, without the model, without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from axolotl.core.trainers.grpo.weight_sync.delivery import require_finite
from axolotl.core.trainers.grpo.weight_sync.full_weights import publish_weights
from axolotl.core.trainers.grpo.weight_sync.merged import Named
from axolotl.errors import SyncError
from axolotl.serving.wire import TensorLayout


class HostCopy:
    """The weights of one version. `take` on the main thread, `publish` on any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version: int | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, version: int, weights: Iterable[Named]) -> tuple[list[TensorLayout], str]:
        """Copy `weights`; the version before is gone from here on.

        Returns:
            What they look like, in order, and a digest of that and of every tensor's sum: other weights have another.
            The server repeats the digest and cannot check it; the proof of sync finds tensors that arrived as others.

        Raises:
            NumericError: `E-NUM-02` they are not finite.
            SyncError: `E-SYN-01` one is not of floating-point numbers.
        """
        with self._lock:
            self._version = None
            before, self._tensors = self._tensors, {}
            sums: dict[str, torch.Tensor] = {}
            for name, tensor in weights:
                _require_float(name, tensor)
                # In float64 a sum is infinite only when a term is.
                sums[name] = tensor.sum(dtype=torch.float64)
                self._tensors[name] = _copied(tensor, before.pop(name, None))
            require_finite(sums, version)
            self._version = version
            layout = [_layout(name, tensor) for name, tensor in self._tensors.items()]
        return layout, _digest(layout, [total.item() for total in sums.values()])

    def publish(self, version: int, root: Path, served: torch.dtype) -> str:
        """Publish it as files below `root`; returns the digest of the manifest."""
        with self._lock:
            assert version == self._version, f"version {version} is wanted, {self._version} is here"
            return publish_weights(root, version, self._tensors.items(), served)[0]


def _copied(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
    return buffer.copy_(tensor)


def _require_float(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise SyncError(
            f"tensor {name!r} is of type {tensor.dtype}, not floating-point",
            code="E-SYN-01",
            why="a server cannot take it as a weight",
        )


def _layout(name: str, tensor: torch.Tensor) -> TensorLayout:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorLayout.model_validate({"name": name, "dtype": dtype, "shape": list(tensor.shape)})


def _digest(layout: list[TensorLayout], sums: list[float]) -> str:
    rows = [[item.name, item.dtype, item.shape, total.hex()] for item, total in zip(layout, sums, strict=True)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
