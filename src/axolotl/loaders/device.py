"""Which device and which number format, decided once from what the machine has.

Torch is imported only where `auto` needs it.
"""

from __future__ import annotations

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
    """The device to use: the one named, else the accelerator torch sees, else `cpu`. None and `auto` mean choose."""
    if device not in (None, "auto"):
        assert device is not None
        return device
    import torch

    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
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
