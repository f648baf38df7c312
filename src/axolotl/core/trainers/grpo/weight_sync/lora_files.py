"""Adapter versions through a directory that trainer and server share.

The server is told a version's number and the digest of its manifest, never a path, and answers when it serves it.
Directories stay until the server says that it holds the version no longer; the canary's stays, to be sent again to a
server that was restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from axolotl.core.trainers.grpo.weight_sync.delivery import ADAPTER, Delivered, check_reached, require_finite
from axolotl.core.trainers.grpo.weight_sync.publish import publish, remove_others
from axolotl.failpoints import point
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import CANARY_VERSION


class LoraFiles:
    """A `Delivery` over files and one HTTP call.

    policy: returns the PEFT model (unwrapped) whose `default` adapter is trained. directory: this run's place under
    the server's `sync_dir`.
    """

    has_adapter = True

    def __init__(self, policy: Callable[[], PeftModel], client: ServerClient, directory: Path) -> None:
        self._policy = policy
        self._client = client
        self._directory = directory

    def deliver(self, version: int) -> Delivered:
        """Publish the adapter as it is now as `version` and return when the server serves it.

        Raises:
            SyncError: the server refused the adapter, confirmed something else, or applied it to fewer modules than it
                has.
            NumericError: it is not finite.
        """
        started = time.perf_counter()
        model = self._policy()
        tensors = _adapter_tensors(model)
        require_finite(tensors, version)
        config = model.peft_config[ADAPTER]
        assert isinstance(config, LoraConfig)

        def write(directory: Path) -> None:
            save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
            _write_config(config, directory)

        digest = publish(self._directory, version, write, kind="adapter", rank=config.r)
        saved = time.perf_counter()
        answer = self._client.set_adapter(version, digest)
        point("sync.after_post")
        check_reached(answer.num_modules, sum(".lora_A." in name for name in tensors), f"adapter version {version}")
        remove_others(self._directory, {*answer.loaded_versions, version, CANARY_VERSION})
        return Delivered(save_s=saved - started, load_s=time.perf_counter() - saved, digest=digest)


def _adapter_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(
        # Left to itself, PEFT asks the model hub at every call whether embeddings were resized.
        model,
        adapter_name=ADAPTER,
        save_embedding_layers=False,
    )
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _write_config(config: LoraConfig, directory: Path) -> None:
    was_inference, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(str(directory))
    finally:
        config.inference_mode = was_inference
