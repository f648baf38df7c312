"""Full weights through a directory that trainer and server share: all of the model, or an adapter merged into it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from axolotl.core.trainers.grpo.weight_sync.delivery import Delivered, check_reached, require_finite
from axolotl.core.trainers.grpo.weight_sync.merged import Named, policy_weights
from axolotl.core.trainers.grpo.weight_sync.publish import publish, remove_others
from axolotl.failpoints import point
from axolotl.serving.client import ServerClient

SHARD_BYTES = 1 << 30


class FullWeights:
    """A `Delivery` over files and one HTTP call. Memory: one shard beyond the model.

    policy: returns the model that is trained (unwrapped). directory: this run's place for weights under the server's
    `sync_dir`. shard_bytes: about the size of one file.
    """

    has_adapter = False

    def __init__(
        self,
        policy: Callable[[], nn.Module],
        client: ServerClient,
        directory: Path,
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._policy = policy
        self._client = client
        self._directory = directory
        self._shard_bytes = shard_bytes

    def deliver(self, version: int) -> Delivered:
        """Publish all weights as they are now as `version` and return when the server serves them.

        Raises:
            SyncError: the server refused the weights or confirmed something else.
            NumericError: they are not finite.
        """
        started = time.perf_counter()
        digest, count = publish_weights(
            self._directory,
            version,
            policy_weights(self._policy()),
            served_dtype(self._client.info.dtype),
            shard_bytes=self._shard_bytes,
        )
        saved = time.perf_counter()
        answer = self._client.set_weights(version, digest)
        point("sync.after_post")
        check_reached(answer.num_modules, count, f"weights version {version}")
        remove_others(self._directory, {version})
        return Delivered(save_s=saved - started, load_s=time.perf_counter() - saved, digest=digest)


def publish_weights(
    root: Path, version: int, weights: Iterable[Named], served: torch.dtype, *, shard_bytes: int = SHARD_BYTES
) -> tuple[str, int]:
    """Publish `weights` as `root/v<version>`; returns the digest of the manifest and how many tensors there are.

    Raises:
        NumericError: `E-NUM-02` they are not finite.
    """
    count = 0

    def write(directory: Path) -> None:
        nonlocal count
        for number, shard in enumerate(shards(weights, shard_bytes, served)):
            require_finite(shard, version)
            save_file(shard, directory / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
            count += len(shard)

    return publish(root, version, write, kind="weights"), count


def served_dtype(name: str) -> torch.dtype:
    """The format that the server computes in, as it names it."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def narrowed(tensor: torch.Tensor, served: torch.dtype) -> torch.Tensor:
    """In the number format of the server where that is narrower: the server would round it anyway."""
    if tensor.is_floating_point() and tensor.element_size() > served.itemsize:
        return tensor.to(served)
    return tensor


def shards(weights: Iterable[Named], size: int, served: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors on the CPU in files of about `size` bytes, each with at least one, `narrowed` to `served`."""
    shard: dict[str, torch.Tensor] = {}
    used = 0
    for name, tensor in weights:
        tensor = narrowed(tensor, served).cpu().contiguous()
        if shard and used + tensor.nbytes > size:
            yield shard
            shard, used = {}, 0
        shard[name] = tensor
        used += tensor.nbytes
    if shard:
        yield shard
