"""A model's weights replaced in place by those of a directory: everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.work import Work

MAX_NAMED = 3
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class WeightFiles:
    """Checked against a model. files: tensor name -> the file that has it."""

    files: Mapping[str, Path]


def check_weight_files(model: nn.Module, directory: Path) -> WeightFiles:
    """The safetensors files of `directory`, if they hold the weights of `model` under its own names.

    Floating-point tensors may come in any of float64, float32, float16 and bfloat16, whatever the model computes in;
    they are converted. A weight that the model shares between two names (tied embeddings) may come under one of them,
    or under both with equal values. Buffers may be left out: nothing trains them.

    Raises:
        EngineRejects: a name, a shape or a type that is not the model's, or a weight that is missing; the first ones
            are named.
    """
    expected = _tensors(model)
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping, it has `keys` only)
                    if name in files:
                        raise EngineRejects(f"tensor {name!r} is in two files")
                    files[name] = path
                    if name in expected:
                        part = tensors.get_slice(name)
                        _check_tensor(name, tuple(part.get_shape()), part.get_dtype(), expected[name])
        except SafetensorError as error:
            raise EngineRejects(f"{path.name} is not a valid safetensors file") from error
    _refuse(sorted(files.keys() - expected.keys()), "tensors are not the model's")
    given = {_identity(expected[name]) for name in files}
    _refuse(
        [name for name, _ in model.named_parameters() if _identity(expected[name]) not in given],
        "of the model's weights are missing",
    )
    _check_tied(files, expected)
    return WeightFiles(files)


@torch.no_grad()
def copy_weights(model: nn.Module, weights: WeightFiles, work: Work) -> int:
    """Write the tensors of `weights` over the model's own; returns how many. A failure leaves a mixture."""
    targets = _tensors(model)
    for path in sorted(set(weights.files.values())):
        with safe_open(path, framework="pt") as tensors:
            for name in (name for name, file in weights.files.items() if file == path):
                targets[name].copy_(tensors.get_tensor(name))
                work.replaced_tensor()
    return len(weights.files)


@torch.no_grad()
def copy_tensors(model: nn.Module, source: Mapping[str, torch.Tensor], work: Work) -> None:
    """Write `source` (another model's `state_dict` of the same names and shapes) over the model's own tensors."""
    targets = _tensors(model)
    assert targets.keys() == source.keys(), sorted(targets.keys() ^ source.keys())[:MAX_NAMED]
    for name, tensor in source.items():
        targets[name].copy_(tensor)
        work.replaced_tensor()


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors themselves, tied ones under each of their names."""
    return dict(model.state_dict())


def _identity(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Equal for two names of one weight. Empty tensors have no address of their own, but nothing to miss either."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _check_tensor(name: str, shape: tuple[int, ...], dtype: str, own: torch.Tensor) -> None:
    if shape != tuple(own.shape):
        raise EngineRejects(f"tensor {name!r} has shape {list(shape)}, the model's is {list(own.shape)}")
    if (dtype in _FLOATS) != own.is_floating_point():
        raise EngineRejects(f"tensor {name!r} is of type {dtype}, the model's is {own.dtype}")


def _check_tied(files: Mapping[str, Path], expected: Mapping[str, torch.Tensor]) -> None:
    """Two values for one weight would be decided by their order."""
    first: dict[object, str] = {}
    for name in sorted(files):
        other = first.setdefault(_identity(expected[name]), name)
        if other != name and not torch.equal(_read(files[other], other), _read(files[name], name)):
            raise EngineRejects(f"tensors {other!r} and {name!r} are one weight of the model, but they differ")


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as tensors:
        return tensors.get_tensor(name)  # type: ignore[no-any-return]


def _refuse(names: list[str], what: str) -> None:
    if names:
        more = ", ..." if len(names) > MAX_NAMED else ""
        raise EngineRejects(f"{len(names)} {what}: {', '.join(names[:MAX_NAMED])}{more}")
