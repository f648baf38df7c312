"""Full weights of a pushed version against the base model's files, before an engine sees them.

Only the headers of the safetensors files are read. The names are those of the base model's own files; a tensor that the
model shares with another (tied embeddings) may be absent on either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from axolotl.serving.engines.protocol import EngineRejects

Shape = tuple[int, ...]

OUTPUT_WEIGHT = "lm_head.weight"
INPUT_WEIGHT = "embed_tokens.weight"

#: Constants that older models keep among their weights and newer ones compute.
COMPUTED = "rotary_emb.inv_freq"


def check_weights(directory: Path, base: Mapping[str, Shape], *, is_tied: bool) -> int:
    """How many tensors `directory` replaces.

    base: name -> shape of the base model's floating-point weights. is_tied: the output layer is the input embedding.
    Raises `EngineRejects` unless every weight of the base model is there, in its shape and as a floating-point number
    of any size, and nothing else is.
    """
    if not base:
        raise EngineRejects("the base model has no safetensors files that the weights could be compared with")
    pushed = _read_headers(directory)
    allowed = dict(base)
    optional = {name for name in base if name.endswith(COMPUTED)}
    if is_tied:
        optional.add(OUTPUT_WEIGHT)
        inputs = [shape for name, shape in base.items() if name.endswith(INPUT_WEIGHT)]
        if len(inputs) == 1:
            allowed.setdefault(OUTPUT_WEIGHT, inputs[0])
    _refuse(sorted(base.keys() - optional - pushed.keys()), "of the model's weights are missing")
    _refuse(sorted(pushed.keys() - allowed.keys()), "weights are not the model's")
    for name, shape in pushed.items():
        if shape != allowed[name]:
            raise EngineRejects(f"tensor {name!r} has shape {list(shape)}, the base model's is {list(allowed[name])}")
    return len(pushed)


def _read_headers(directory: Path) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping, it has `keys` only)
                    part = tensors.get_slice(name)
                    if not part.get_dtype().startswith(("F", "BF")):
                        raise EngineRejects(f"tensor {name!r} is of type {part.get_dtype()}, not floating-point")
                    if name in shapes:
                        raise EngineRejects(f"tensor {name!r} is in two files")
                    shapes[name] = tuple(part.get_shape())
        except SafetensorError as error:
            raise EngineRejects(f"{path.name} is not a valid safetensors file") from error
    return shapes


def _refuse(names: list[str], what: str) -> None:
    if names:
        raise EngineRejects(f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
