"""Memory that runs out where a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

ALLOCATION = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation."


def first_layer(trainer: AxolotlGRPOTrainer) -> nn.Module:
    return trainer.policy().get_base_model().model.layers[0]  # type: ignore[operator,union-attr,no-any-return,index]


def run_out(
    trainer: AxolotlGRPOTrainer, where: str, *passes: int, make: Callable[[str], Exception] = torch.OutOfMemoryError
) -> list[int]:
    """Memory runs out in these passes, counted from 1; returns the list of how many completions each pass has.

    In a backward pass the layers above the first one have added their gradients by then.
    """
    sizes: list[int] = []

    def forward(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        sizes.append(len(inputs[0]))
        if where == "forward" and len(sizes) in passes:
            raise make(ALLOCATION)

    def backward(module: nn.Module, gradients: Any) -> None:
        if where == "backward" and len(sizes) in passes:
            raise make(ALLOCATION)

    first_layer(trainer).register_forward_pre_hook(forward)
    first_layer(trainer).register_full_backward_pre_hook(backward)
    return sizes
