"""An adapter merged into a copy of the weights it touches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from axolotl.serving.engines.lora import LoraPair
from axolotl.serving.engines.protocol import EngineRejects


class MergedWeights:
    """Which adapter is merged into a model. Merging always starts from the base weights, so nothing drifts.

    The base tensors stay untouched; each touched module gets one extra buffer, made at its first merge and used by
    every later one. With `merge({})` the model computes with its own tensors again, which may then be written over.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
        }
        self._shared = _shared_parameters(model)
        self._base: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def check(self, pairs: Mapping[str, LoraPair]) -> None:
        """Raise `EngineRejects` unless every pair fits a linear module whose weight is its own."""
        for name, pair in pairs.items():
            if name not in self._modules:
                raise EngineRejects(f"the model has no linear module {name!r}")
            module = self._modules[name]
            if id(module.weight) in self._shared:
                # Merging would change the other module too, which the trained adapter does not.
                others = sorted(self._shared[id(module.weight)] - {f"{name}.weight"})
                raise EngineRejects(f"module {name!r} shares its weight with {', '.join(others)}")
            expected = tuple(module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape)
            if (pair.b.shape[0], pair.a.shape[1]) != expected:
                raise EngineRejects(
                    f"module {name!r} is {expected[1]} -> {expected[0]}, "
                    f"the adapter is for {pair.a.shape[1]} -> {pair.b.shape[0]}"
                )

    @torch.no_grad()
    def merge(self, pairs: Mapping[str, LoraPair]) -> None:
        """Make the model compute base + scale * B @ A in exactly the modules of `pairs`; none of them means base.

        After a failure half-way the next merge puts everything right.
        """
        for name, base in self._base.items():
            self._modules[name].weight.data = base
        for name, pair in pairs.items():
            module = self._modules[name]
            base = self._base.setdefault(name, module.weight.data)
            if name not in self._buffers:
                self._buffers[name] = torch.empty_like(base)
            buffer = self._buffers[name]
            a = pair.a.to(base.device, torch.float32)
            b = pair.b.to(base.device, torch.float32)
            left, right = (a.T, b.T) if isinstance(module, Conv1D) else (b, a)
            if base.dtype == torch.float32:
                # Faster than one `addmm` with `out`, which is read and written twice.
                buffer.copy_(base).addmm_(left, right, alpha=pair.scale)
            else:
                buffer.copy_(base.float().addmm_(left, right, alpha=pair.scale))
            module.weight.data = buffer


def _shared_parameters(model: nn.Module) -> dict[int, set[str]]:
    """Identity -> names of the parameters that have several names."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {key: shared for key, shared in names.items() if len(shared) > 1}
