"""A temporary policy that nobody could mistake for the base model.

A fresh adapter computes nothing (its B is zero), so that a server that ignores it looks right for hours. The canary
puts random numbers into B for a moment and puts back exactly what was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from axolotl.core.trainers.grpo.weight_sync.delivery import ADAPTER

_SEED = 20_260


@contextmanager
@torch.no_grad()
def canary(model: PeftModel, scale: float) -> Iterator[None]:
    """The adapter with random B, each entry normal with deviation `scale`; afterwards bitwise what it was before.

    The numbers are the same at every call up to `scale`, and the global random state is left alone.
    """
    generator = torch.Generator().manual_seed(_SEED)
    weights: list[torch.Tensor] = [cast(nn.Linear, layer.lora_B[ADAPTER]).weight for layer in _layers(model)]
    saved = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        yield
    finally:
        for weight, values in zip(weights, saved, strict=True):
            weight.copy_(values)


def _layers(model: PeftModel) -> Iterator[LoraLayer]:
    for module in model.modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_B:
            yield module
