"""A temporary policy that nobody could mistake for the base model, and no trace of it afterwards.

    with an adapter   random numbers in the matrix that is zero in a fresh one; what was there is kept aside
    weights           the signs of random rows are flipped, and flipped back: no second copy of anything

A fresh adapter computes nothing, and the first full weights are the base model's, so that a server that ignores what is
pushed looks right for hours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from axolotl.core.trainers.grpo.weight_sync.delivery import ADAPTER

NUM_SIZES = 24
_SEED = 20_260
_SMALLEST_DEVIATION = 1e-3
_SMALLEST_SHARE = 2.0**-10
_LARGEST_SHARE = 0.5


@contextmanager
@torch.no_grad()
def canary(model: nn.Module, size: int) -> Iterator[None]:
    """The model with other weights, in every place that is pushed; afterwards bitwise what it was before.

    Each size is about twice the one before, from 0 to `NUM_SIZES` - 1; the rows are half of all at most. The same size
    is the same canary at every call, and the global random state is left alone.
    """
    adapter = list(_zero_in_a_fresh_one(model))
    saved = [weight.detach().clone() for weight in adapter]
    generator = torch.Generator().manual_seed(_SEED)
    share = min(_LARGEST_SHARE, _SMALLEST_SHARE * 2.0**size)
    flipped: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for weight in adapter:
            weight.copy_(torch.randn(weight.shape, generator=generator) * _SMALLEST_DEVIATION * 2.0**size)
        for weight in _pushed_whole(model):
            count = math.ceil(share * len(weight))
            rows = torch.randperm(len(weight), generator=generator)[:count].to(weight.device)
            _flip(weight, rows)
            flipped.append((weight, rows))
        yield
    finally:
        for weight, values in zip(adapter, saved, strict=True):
            weight.copy_(values)
        for weight, rows in flipped:
            _flip(weight, rows)


def _flip(weight: torch.Tensor, rows: torch.Tensor) -> None:
    """Exact, and undone by itself, in every number format."""
    weight.index_copy_(0, rows, -weight.index_select(0, rows))


def _zero_in_a_fresh_one(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            if ADAPTER in module.lora_B:
                yield cast(nn.Linear, module.lora_B[ADAPTER]).weight
            if ADAPTER in module.lora_embedding_A:
                yield module.lora_embedding_A[ADAPTER]


def _pushed_whole(model: nn.Module) -> Iterator[torch.Tensor]:
    """Without an adapter all the weights; with one those that are trained beside its matrices."""
    has_adapter = isinstance(model, PeftModel)
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.dim() == 0 or len(weight) == 0:
            continue
        if not has_adapter or (weight.requires_grad and ".lora_" not in name):
            yield weight
