from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.weight_files import check_weights

BASE = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.mlp.weight": (8, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}
TIED = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"}


def tensors(shapes: dict[str, tuple[int, ...]] = BASE, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def save(directory: Path, *files: dict[str, torch.Tensor]) -> Path:
    for number, contents in enumerate(files):
        save_file(contents, directory / f"model-{number}.safetensors")
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_weights_in_any_floating_point_type(tmp_path: Path, dtype: torch.dtype) -> None:
    assert check_weights(save(tmp_path, tensors(dtype=dtype)), BASE, is_tied=False) == 4


def test_weights_in_several_files(tmp_path: Path) -> None:
    parts = [{name: tensor} for name, tensor in tensors().items()]
    assert check_weights(save(tmp_path, *parts), BASE, is_tied=False) == 4


@pytest.mark.parametrize(("base", "pushed"), [(BASE, TIED), (TIED, BASE), (TIED, TIED), (BASE, BASE)])
def test_a_tied_output_layer_may_be_absent_on_either_side(
    tmp_path: Path, base: dict[str, tuple[int, ...]], pushed: dict[str, tuple[int, ...]]
) -> None:
    assert check_weights(save(tmp_path, tensors(pushed)), base, is_tied=True) == len(pushed)


def test_a_tied_weight_that_comes_twice_has_one_value(tmp_path: Path) -> None:
    differing = tensors() | {"lm_head.weight": torch.ones(10, 4)}
    with pytest.raises(EngineRejects, match="are one weight, but they differ"):
        check_weights(save(tmp_path, differing), TIED, is_tied=True)


def test_an_output_layer_of_its_own_may_not(tmp_path: Path) -> None:
    with pytest.raises(EngineRejects, match=r"1 of the model's weights are missing: lm_head\.weight"):
        check_weights(save(tmp_path, tensors(TIED)), BASE, is_tied=False)


def test_what_newer_models_compute_need_not_be_stored(tmp_path: Path) -> None:
    base = {**BASE, "model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}
    assert check_weights(save(tmp_path, tensors()), base, is_tied=False) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.extra.weight": torch.zeros(2)}, r"1 weights are not the model's: model\.extra\.weight"),
        ({"model.norm.weight": torch.zeros(5)}, r"'model\.norm\.weight' has shape \[5\], the base model's is \[4\]"),
        ({"model.norm.weight": torch.zeros(4, dtype=torch.int32)}, "is of type I32"),
        ({"model.norm.weight": torch.zeros(4).to(torch.float8_e4m3fn)}, "is of type F8"),
        ({"lm_head.weight": torch.zeros(4, 10)}, r"shape \[4, 10\]"),
    ],
)
def test_what_is_not_the_models_is_named(tmp_path: Path, change: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(EngineRejects, match=reason):
        check_weights(save(tmp_path, tensors() | change), BASE, is_tied=False)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    with pytest.raises(EngineRejects, match="in two files"):
        check_weights(save(tmp_path, tensors(), {"model.norm.weight": torch.zeros(4)}), BASE, is_tied=False)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(EngineRejects, match=r"4 of the model's weights are missing: .*, \.\.\.$"):
        check_weights(tmp_path, BASE, is_tied=False)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    file = save(tmp_path, tensors()) / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(EngineRejects, match=r"model-0\.safetensors is not a valid safetensors file"):
        check_weights(tmp_path, BASE, is_tied=False)


def test_nothing_to_compare_with(tmp_path: Path) -> None:
    with pytest.raises(EngineRejects, match="base model has no safetensors"):
        check_weights(save(tmp_path, tensors()), {}, is_tied=False)
