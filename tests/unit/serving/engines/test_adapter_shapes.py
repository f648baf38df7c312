from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from axolotl.serving.engines.adapter_shapes import base_shapes, check_shapes
from axolotl.serving.engines.lora import LoraPair
from axolotl.serving.engines.protocol import EngineRejects

BASE = {"layers.0.q.weight": (6, 4), "norm.weight": (4,)}


def pair(rows: int, columns: int, rank: int = 2) -> LoraPair:
    return LoraPair(torch.zeros(rank, columns), torch.zeros(rows, rank), 1.0)


def test_shapes_are_read_from_every_file_and_packed_weights_are_left_out(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors")
    save_file(
        {"b.weight": torch.zeros(5, dtype=torch.bfloat16), "packed.weight": torch.zeros(7, 1, dtype=torch.uint8)},
        tmp_path / "model-2.safetensors",
    )
    assert base_shapes(tmp_path) == {"a.weight": (2, 3), "b.weight": (5,)}
    assert base_shapes(tmp_path / "none") == {}


def test_a_fitting_pair_passes() -> None:
    check_shapes({"layers.0.q": pair(6, 4)}, BASE)


@pytest.mark.parametrize(("rows", "columns"), [(6, 3), (5, 4), (4, 6)])
def test_a_pair_of_another_shape_is_named(rows: int, columns: int) -> None:
    with pytest.raises(EngineRejects, match=rf"'layers\.0\.q'.*\[{rows}, {columns}\].*\[6, 4\]"):
        check_shapes({"layers.0.q": pair(rows, columns)}, BASE)


def test_modules_that_the_files_name_otherwise_are_left_to_the_engine() -> None:
    check_shapes({"layers.0.fused": pair(9, 9)}, BASE)
