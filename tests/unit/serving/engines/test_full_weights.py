"""Weights written over a model's own: all of the checks first, then a copy that is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from axolotl.serving.engines.full_weights import check_weight_files, copy_tensors, copy_weights
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.work import Work
from tests.support.tiny_model import tiny_config

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"


def make_model(*, seed: int, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(num_hidden_layers=1, tie_word_embeddings=tied))


def tensors_of(model: torch.nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def written(directory: Path, tensors: Tensors) -> Path:
    """In two files, as large models are saved."""
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name].contiguous() for name in part}, directory / f"model-{number}.safetensors")
    return directory


def test_every_tensor_is_replaced_in_place(tmp_path: Path) -> None:
    model, other = make_model(seed=0), make_model(seed=1)
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    work = Work()
    assert copy_weights(model, check_weight_files(model, written(tmp_path, tensors_of(other))), work) == 12
    assert (work.processed, work.generated) == (12, 0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]) and tensor.data_ptr() == addresses[name]


def test_other_number_formats_are_converted(tmp_path: Path) -> None:
    model, other = make_model(seed=0).bfloat16(), make_model(seed=1)
    copy_weights(model, check_weight_files(model, written(tmp_path, tensors_of(other))), Work())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name].bfloat16())


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight", None])
def test_a_tied_weight_comes_under_either_name(tmp_path: Path, left_out: str | None) -> None:
    model, other = make_model(seed=0, tied=True), make_model(seed=1, tied=True)
    tensors = {name: tensor for name, tensor in tensors_of(other).items() if name != left_out}
    copy_weights(model, check_weight_files(model, written(tmp_path, tensors)), Work())
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def change(name: str, tensor: torch.Tensor | None) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in {**tensors, name: tensor}.items() if value is not None}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (change(NORM, None), "1 of the model's weights are missing: model.norm.weight"),
        (lambda tensors: {}, r"12 of the model's weights are missing: model.embed_tokens.weight, .*, \.\.\."),
        (change("model.extra", torch.ones(2)), "1 tensors are not the model's: model.extra"),
        (change(NORM, torch.ones(63)), r"'model.norm.weight' has shape \[63\], the model's is \[64\]"),
        (change(NORM, torch.ones(64, dtype=torch.int32)), "'model.norm.weight' is of type I32"),
        (change(NORM, torch.ones(64, dtype=torch.float8_e4m3fn)), "'model.norm.weight' is of type F8_E4M3"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, changed: Callable[[Tensors], Tensors], named: str) -> None:
    model = make_model(seed=0)
    before = tensors_of(model)
    with pytest.raises(EngineRejects, match=named):
        check_weight_files(model, written(tmp_path, changed(tensors_of(make_model(seed=1)))))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_buffers_may_be_left_out(tmp_path: Path) -> None:
    model = make_model(seed=0)
    model.register_buffer("scale", torch.full((1,), 3.0))
    copy_weights(model, check_weight_files(model, written(tmp_path, tensors_of(make_model(seed=1)))), Work())
    assert model.get_buffer("scale").tolist() == [3.0]


def test_a_tied_weight_under_both_names_with_two_values(tmp_path: Path) -> None:
    model = make_model(seed=0, tied=True)
    tensors = tensors_of(model)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(EngineRejects, match="are one weight of the model, but they differ"):
        check_weight_files(model, written(tmp_path, tensors))


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    model = make_model(seed=0)
    written(tmp_path, tensors_of(model))
    save_file({NORM: torch.ones(64)}, tmp_path / "more.safetensors")
    with pytest.raises(EngineRejects, match=r"'model\.norm\.weight' is in two files"):
        check_weight_files(model, tmp_path)


def test_a_file_that_is_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04 pickle")
    with pytest.raises(EngineRejects, match=r"model\.safetensors is not a valid safetensors file"):
        check_weight_files(make_model(seed=0), tmp_path)


def test_tensors_of_another_copy_of_the_model() -> None:
    model, other = make_model(seed=0, tied=True), make_model(seed=1, tied=True)
    work = Work()
    copy_tensors(model, other.state_dict(), work)
    assert work.processed == len(other.state_dict())
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
