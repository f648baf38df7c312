"""Shapes of an adapter against those of the base model's weights, before an engine sees either.

vLLM copies a matrix that is too small into its larger buffer without a word; here it is an error that names the module.
Only the headers of the base model's safetensors files are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from axolotl.serving.engines.lora import LoraPair
from axolotl.serving.engines.protocol import EngineRejects

Shape = tuple[int, ...]


def base_shapes(model_directory: Path) -> dict[str, Shape]:
    """Name -> shape of the base model's floating-point weights; empty when it has no safetensors files."""
    shapes: dict[str, Shape] = {}
    for path in sorted(model_directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping, it has `keys` only)
                part = tensors.get_slice(name)
                if part.get_dtype().startswith(("F", "BF")):
                    shapes[name] = tuple(part.get_shape())
    return shapes


def check_shapes(modules: Mapping[str, LoraPair], base: Mapping[str, Shape]) -> None:
    """Raise `EngineRejects` when the product of a pair does not have the shape of the base weight of that module.

    Modules that the base model's files name otherwise (fused or quantised layers) are left to the engine.
    """
    for module, pair in modules.items():
        weight = base.get(f"{module}.weight")
        changed = (pair.b.shape[0], pair.a.shape[1])
        if weight is not None and len(weight) == 2 and changed != weight:
            raise EngineRejects(
                f"module {module!r}: the adapter changes a weight of shape {list(changed)}, "
                f"the base model's is {list(weight)}"
            )
