"""The weights of a policy as the base model would hold them, with what an adapter changes worked in.

Each layer is merged in a copy of its own, one layer at a time: the training weights are only read, so nothing drifts
however often this is done.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from axolotl.core.trainers.grpo.weight_sync.delivery import ADAPTER

Named = tuple[str, torch.Tensor]


def policy_weights(model: nn.Module) -> Iterator[Named]:
    """Names as in the base model and its detached tensors; one that has two names comes under the first only.

    Handles whatever PEFT's own layers can merge (LoRA, DoRA, biases, changed base weights) and `modules_to_save`.
    """
    root = model.get_base_model() if isinstance(model, PeftModel) else model
    shared: set[int] = set()
    for name, tensor in _weights(root, ""):
        if id(tensor) not in shared:
            yield name, tensor.detach()
        if isinstance(tensor, nn.Parameter):
            # Merged copies are plain tensors and go away; parameters stay, and so do their identities.
            shared.add(id(tensor))


def _weights(module: nn.Module, prefix: str) -> Iterator[Named]:
    if isinstance(module, BaseTunerLayer):
        yield from _merged(module, prefix)
        return
    if isinstance(module, ModulesToSaveWrapper):
        yield from _weights(module.modules_to_save[ADAPTER], prefix)
        return
    own = {**module._parameters, **_persistent_buffers(module)}
    for name, tensor in own.items():
        if tensor is not None:
            yield prefix + name, tensor
    for name, child in module.named_children():
        yield from _weights(child, f"{prefix}{name}.")


def _merged(layer: BaseTunerLayer, prefix: str) -> Iterator[Named]:
    with torch.no_grad():
        alone = copy.deepcopy(layer)
        alone.merge(safe_merge=True, adapter_names=[ADAPTER])
        state = alone.get_base_layer().state_dict()
    for name, tensor in state.items():
        yield prefix + name, tensor


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    skipped = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if name not in skipped}
