"""Every collective of ours. All ranks call these, in the same order, from the main thread."""

from __future__ import annotations

import torch
from accelerate import Accelerator


def sum_over_ranks(accelerator: Accelerator, value: float) -> float:
    """The sum of one number a rank, on every rank."""
    if accelerator.num_processes == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=accelerator.device)
    return float(accelerator.gather(tensor).sum())
