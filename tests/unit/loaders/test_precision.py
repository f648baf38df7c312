import pytest
import torch

from axolotl.cli.config import config_from_mapping
from axolotl.loaders import precision
from axolotl.loaders.model import attention, lora_config
from axolotl.utils.schemas.config import AxolotlConfig


def config(**options: object) -> AxolotlConfig:
    base = {"base_model": "m", "rl": "grpo", "micro_batch_size": 8, "datasets": [{"path": "rows.jsonl"}]}
    return config_from_mapping({**base, "trl": {"reward_funcs": ["r.one"]}, **options})


def test_auto_is_float32_on_a_cpu() -> None:
    assert precision.resolve_precision(config(bf16="auto"), "cpu") == precision.Precision(torch.float32, None)


def test_bf16_is_obeyed_on_a_cpu_and_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_fast_bf16_cpu", lambda: False)
    slow = precision.resolve_precision(config(bf16=True), "cpu")
    assert slow.autocast is torch.bfloat16 and "slower" in slow.note
    monkeypatch.setattr(precision, "has_fast_bf16_cpu", lambda: True)
    assert precision.resolve_precision(config(bf16=True), "cpu").note == ""


def test_a_frozen_base_is_held_in_the_half_format_and_trained_weights_are_not() -> None:
    assert precision.resolve_precision(config(bf16=True, adapter="lora"), "cpu").weights is torch.bfloat16
    assert precision.resolve_precision(config(bf16=True), "cpu").weights is torch.float32


def test_flash_attention_means_sdpa_on_a_cpu() -> None:
    assert attention(config(flash_attention=True), "cpu") == "sdpa"
    assert attention(config(attn_implementation="flex_attention"), "cpu") == "sdpa"
    assert attention(config(flash_attention=True), "cuda") == "flash_attention_2"
    assert attention(config(attn_implementation="eager"), "cpu") == "eager"
    assert attention(config(), "cuda") == "sdpa"


def test_the_adapter_is_described_to_peft() -> None:
    described = lora_config(config(adapter="lora", lora_r=4, lora_alpha=8, lora_target_modules=["q_proj"]))
    assert described is not None
    assert (described.r, described.lora_alpha, described.target_modules) == (4, 8, {"q_proj"})
    linear = lora_config(config(adapter="lora", lora_target_linear=True))
    assert linear is not None and linear.target_modules == "all-linear"
    assert lora_config(config()) is None
