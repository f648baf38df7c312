"""Which device and which number format, decided once from what the machine has.

Torch is imported only where `auto` needs it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DtypeName = Literal["float32", "bfloat16", "float16"]

_DTYPE_NAMES: dict[str, DtypeName] = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
}


def pick_device(device: str | None = None) -> str:
    """The device to use: the one named, else the accelerator torch sees, else `cpu`. None and `auto` mean choose.

    Apple's `mps` counts as none: it has no float64, which sampling needs.
    """
    if device not in (None, "auto"):
        assert device is not None
        return device
    import torch

    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        if accelerator.type != "mps":
            return accelerator.type
    return "cpu"


def has_fast_bf16_cpu() -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively. Without AVX-512 or AMX such products are about six
    times slower than float32. Unknown platforms count as not fast."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    return "avx512_bf16" in flags or "amx_bf16" in flags


def resolve_server_dtype(setting: str, *, device: str, fallback: str = "bfloat16") -> DtypeName:
    """The dtype the server's weights are kept in.

    Args:
        setting: `vllm.dtype`; a name, or `auto`: float32 on a CPU, elsewhere `fallback`.
        fallback: the checkpoint's own dtype.

    Raises:
        ValueError: the name is no dtype we know.
    """
    if setting == "auto":
        return "float32" if device == "cpu" else _DTYPE_NAMES.get(fallback, "bfloat16")
    if setting not in _DTYPE_NAMES:
        raise ValueError(f"unknown dtype {setting!r}; use one of auto, {', '.join(_DTYPE_NAMES)}")
    return _DTYPE_NAMES[setting]


@dataclass(frozen=True)
class GpuPlan:
    """Which GPUs trainer and managed server see, as values of `CUDA_VISIBLE_DEVICES`; None leaves it as it is.
    note: a line for the user, empty when there is nothing to choose."""

    trainer: str | None
    server: str | None
    note: str = ""


def plan_gpus(visible: Sequence[str], *, num_for_server: int) -> GpuPlan:
    """Share out the visible GPUs: the first ones to the managed server, the next one to the trainer.

    The trainer sees one GPU only, so that nothing wraps the model in DataParallel.

    Args:
        visible: names of the visible GPUs, as in `CUDA_VISIBLE_DEVICES`.
        num_for_server: how many the managed server needs; 0 when the server is not ours.
    """
    if not visible:
        return GpuPlan(None, None)
    if num_for_server == 0:
        if len(visible) == 1:
            return GpuPlan(None, None)
        return GpuPlan(visible[0], None, f"{len(visible)} GPUs are visible: training on GPU {visible[0]} only")
    server = list(visible[:num_for_server])
    rest = visible[num_for_server:]
    if rest:
        note = f"the server generates on GPU {','.join(server)}, training runs on GPU {rest[0]}"
        return GpuPlan(rest[0], ",".join(server), note)
    note = f"server and trainer share GPU {visible[0]}: lower vllm.gpu_memory_utilization if memory runs out"
    return GpuPlan(visible[0], ",".join(server), note)


def visible_gpus() -> list[str]:
    """The GPUs that CUDA would show this process, by the names of `CUDA_VISIBLE_DEVICES`. Touches no GPU."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]
