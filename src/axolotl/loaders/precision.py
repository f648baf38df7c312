"""The number formats of training, from `bf16`, `fp16` and what the device does well."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axolotl.loaders.device import has_fast_bf16_cpu
from axolotl.utils.schemas.config import AxolotlConfig


@dataclass(frozen=True)
class Precision:
    """weights: what the base model is loaded in. autocast: the format of the forward pass, None for that of the
    weights. note: a line for the user when a choice costs something."""

    weights: torch.dtype
    autocast: torch.dtype | None
    note: str = ""


def resolve_precision(config: AxolotlConfig, device: str) -> Precision:
    """How to hold and multiply the weights.

    With an adapter the base model is frozen, so it is held in the half format itself; the adapter stays float32. In
    full fine-tuning the weights stay float32 and only the forward pass is cast: updates of 1e-6 vanish in bfloat16.
    """
    half = _half_format(config, device)
    if half is None:
        return Precision(weights=torch.float32, autocast=None)
    note = ""
    if device == "cpu" and not has_fast_bf16_cpu():
        note = f"{_name(half)} on this CPU: products are several times slower than float32; bf16: auto picks float32"
    weights = half if config.adapter else torch.float32
    return Precision(weights=weights, autocast=half, note=note)


def _half_format(config: AxolotlConfig, device: str) -> torch.dtype | None:
    if config.bf16 is True:
        return torch.bfloat16
    if config.fp16:
        return torch.float16
    if config.bf16 == "auto" and device != "cpu":
        return torch.bfloat16 if device != "cuda" or torch.cuda.is_bf16_supported() else torch.float16
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
