"""Reading adapters: scales as PEFT computes them, and a named refusal for everything that is not plain LoRA."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from axolotl.serving.engines.lora import pair_up, read_adapter
from axolotl.serving.engines.protocol import EngineRejects

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": True}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def tensors(rank: int = 4) -> dict[str, torch.Tensor]:
    return {NAME.format("A"): torch.ones(rank, 6), NAME.format("B"): torch.ones(5, rank)}


def write(directory: Path, config: object = CONFIG, weights: dict[str, torch.Tensor] | None = None) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, directory / "adapter_model.safetensors")
    return directory


def test_pairs_by_module_name(tmp_path: Path) -> None:
    ((module, pair),) = read_adapter(write(tmp_path)).items()
    assert module == "model.layers.0.self_attn.q_proj"
    assert (pair.a.shape, pair.b.shape, pair.scale) == ((4, 6), (5, 4), 2.0)


@pytest.mark.parametrize(
    ("changes", "rank", "scale"),
    [
        ({"use_rslora": True}, 4, 8 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 2}}, 4, 0.5),
        ({"alpha_pattern": {"proj": 2}}, 4, 2.0),
        ({"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2}}, 2, 4.0),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, 4, 2.0),
    ],
)
def test_scales(changes: dict[str, object], rank: int, scale: float) -> None:
    ((_, pair),) = pair_up(tensors(rank), {**CONFIG, **changes}, max_rank=None).items()
    assert pair.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"an_option_of_the_future": 3}, "an_option_of_the_future"),
        ({"r": "8"}, "r and lora_alpha"),
    ],
)
def test_features_that_cannot_be_served(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    with pytest.raises(EngineRejects, match=named):
        read_adapter(write(tmp_path, {**CONFIG, **changes}))


def bad_tensors() -> list[tuple[dict[str, torch.Tensor], str]]:
    good = tensors()
    nan = {**good, NAME.format("A"): torch.full((4, 6), float("nan"))}
    return [
        ({}, "holds no tensor"),
        ({NAME.format("A"): good[NAME.format("A")]}, "lora_A only"),
        ({**good, "base_model.model.lm_head.weight": torch.ones(2, 2)}, "lm_head"),
        (nan, "not finite"),
        ({**good, NAME.format("B"): torch.ones(5, 3)}, "do not have rank 4"),
        ({**good, NAME.format("B"): torch.ones(5)}, "no LoRA matrix"),
        ({**good, NAME.format("B"): torch.ones(0, 4)}, "no LoRA matrix"),
        (tensors(2), "do not have rank 4"),
    ]


@pytest.mark.parametrize(("weights", "named"), bad_tensors())
def test_tensors_that_are_no_adapter(tmp_path: Path, weights: dict[str, torch.Tensor], named: str) -> None:
    with pytest.raises(EngineRejects, match=named):
        read_adapter(write(tmp_path, weights=weights))


def test_the_rank_limit(tmp_path: Path) -> None:
    assert read_adapter(write(tmp_path), max_rank=4)
    with pytest.raises(EngineRejects, match="rank 4 is above the server's limit 3"):
        read_adapter(write(tmp_path), max_rank=3)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04pickle", b"\xff" * 100])
def test_files_that_are_not_safetensors(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(EngineRejects, match="not a valid safetensors"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_configs_that_are_no_config(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(EngineRejects, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
