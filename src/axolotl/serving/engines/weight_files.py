"""Full weights of a pushed version against the base model's files, before an engine sees them.

Only headers are read, unless a shared tensor comes twice. The names are those of the base model's own files; a tensor
that the model shares with another (tied embeddings) may be absent on either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from axolotl.serving.engines.protocol import EngineRejects

Shape = tuple[int, ...]

OUTPUT_WEIGHT = "lm_head.weight"
INPUT_WEIGHT = "embed_tokens.weight"

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

#: Constants that older models keep among their weights and newer ones compute.
COMPUTED = "rotary_emb.inv_freq"


def check_weights(directory: Path, base: Mapping[str, Shape], *, is_tied: bool) -> int:
    """How many tensors `directory` replaces.

    base: name -> shape of the base model's floating-point weights. is_tied: the output layer is the input embedding.
    Raises `EngineRejects` unless every weight of the base model is there, in its shape and as a floating-point number,
    and nothing else is.
    """
    files = _read_headers(directory)
    shared = check_layout({name: shape for name, (_, shape) in files.items()}, base, is_tied=is_tied)
    for name in shared:
        if not torch.equal(_read(files, name), _read(files, OUTPUT_WEIGHT)):
            raise EngineRejects(f"tensors {name!r} and {OUTPUT_WEIGHT!r} are one weight, but they differ")
    return len(files)


def check_layout(pushed: Mapping[str, Shape], base: Mapping[str, Shape], *, is_tied: bool) -> list[str]:
    """Raise `EngineRejects` as `check_weights`, for names and shapes.

    Returns:
        Tensors that come a second time as the output layer.
    """
    if not base:
        raise EngineRejects("the base model has no safetensors files that the weights could be compared with")
    allowed = dict(base)
    optional = {name for name in base if name.endswith(COMPUTED)}
    shared = [name for name in base if name.endswith(INPUT_WEIGHT)][:1] if is_tied else []
    for name in shared:
        optional.add(OUTPUT_WEIGHT)
        allowed.setdefault(OUTPUT_WEIGHT, base[name])
    _refuse(sorted(base.keys() - optional - pushed.keys()), "of the model's weights are missing")
    _refuse(sorted(pushed.keys() - allowed.keys()), "weights are not the model's")
    for name, shape in pushed.items():
        if shape != allowed[name]:
            raise EngineRejects(f"tensor {name!r} has shape {list(shape)}, the base model's is {list(allowed[name])}")
    return shared if OUTPUT_WEIGHT in pushed else []


def _read(files: Mapping[str, tuple[Path, Shape]], name: str) -> torch.Tensor:
    with safe_open(files[name][0], framework="pt") as tensors:
        return tensors.get_tensor(name)  # type: ignore[no-any-return]


def _read_headers(directory: Path) -> dict[str, tuple[Path, Shape]]:
    found: dict[str, tuple[Path, Shape]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping, it has `keys` only)
                    part = tensors.get_slice(name)
                    if part.get_dtype() not in FLOATS:
                        raise EngineRejects(f"tensor {name!r} is of type {part.get_dtype()}, not floating-point")
                    if name in found:
                        raise EngineRejects(f"tensor {name!r} is in two files")
                    found[name] = (path, tuple(part.get_shape()))
        except SafetensorError as error:
            raise EngineRejects(f"{path.name} is not a valid safetensors file") from error
    return found


def _refuse(names: list[str], what: str) -> None:
    if names:
        raise EngineRejects(f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
