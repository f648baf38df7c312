"""Adapter versions through a directory that trainer and server share.

A version is written beside its place, made durable, given a manifest and renamed, so that a reader sees all of it or
nothing. The server is then told its number and the manifest's digest, never a path, and answers when it serves it.
Directories stay until the server says that it holds the version no longer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from axolotl.errors import StorageError, SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.manifest import write_manifest

_ADAPTER = "default"


class LoraFiles:
    """A `WeightSync` over files and one HTTP call.

    policy: returns the PEFT model (unwrapped) whose `default` adapter is trained. directory: this run's place under
    the server's `sync_dir`.
    """

    def __init__(self, policy: Callable[[], PeftModel], client: ServerClient, directory: Path) -> None:
        self._policy = policy
        self._client = client
        self._directory = directory
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def push(self, version: int) -> None:
        """Publish the current weights as `version` and return when the server serves them.

        Raises:
            SyncError: the adapter is not finite, or the server refused it or confirmed something else.
        """
        digest = self._publish(version)
        answer = self._client.set_adapter(version, digest)
        self._version = version
        self._remove_unloaded(set(answer.loaded_versions))

    def close(self) -> None:
        """The directories stay: the server may still serve the last version."""

    def _publish(self, version: int) -> str:
        model = self._policy()
        tensors = {name: value.detach().cpu().contiguous() for name, value in _adapter_tensors(model).items()}
        _require_finite(tensors, version)
        staged, final = self._directory / f".tmp-v{version}", self._directory / f"v{version}"
        try:
            for leftover in (staged, final):
                shutil.rmtree(leftover, ignore_errors=True)
            staged.mkdir(parents=True)
            save_file(tensors, staged / "adapter_model.safetensors", metadata={"format": "pt"})
            config = model.peft_config[_ADAPTER]
            assert isinstance(config, LoraConfig)
            was_inference, config.inference_mode = config.inference_mode, True
            try:
                config.save_pretrained(str(staged))
            finally:
                config.inference_mode = was_inference
            digest = write_manifest(staged, version=version, rank=config.r)
            staged.rename(final)
        except OSError as error:
            raise StorageError(
                f"adapter version {version} could not be written",
                code="E-STO-02",
                why=f"{error.strerror or error} in the server's sync directory",
                do="free space there, or set vllm.sync_dir to another place that trainer and server share",
            ) from error
        return digest

    def _remove_unloaded(self, loaded: set[int]) -> None:
        for directory in self._directory.glob("v*"):
            number = directory.name[1:]
            if number.isdigit() and int(number) not in loaded | {self._version}:
                shutil.rmtree(directory, ignore_errors=True)


def _adapter_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(
        # Left to itself, PEFT asks the model hub at every call whether embeddings were resized.
        model,
        adapter_name=_ADAPTER,
        save_embedding_layers=False,
    )
    return tensors


def _require_finite(tensors: dict[str, torch.Tensor], version: int) -> None:
    """Weights that are not finite would generate noise for hours; they never leave the trainer."""
    broken = [name for name, value in tensors.items() if not bool(value.isfinite().all())]
    if broken:
        raise SyncError(
            f"adapter version {version} is not finite and was not pushed: {broken[0]} and {len(broken) - 1} more",
            code="E-SYN-10",
            why="a training step produced NaN or infinity",
            do="lower learning_rate or max_grad_norm, and resume from the newest checkpoint",
        )
