from __future__ import annotations

import dataclasses

import pytest

from axolotl.errors import ConfigError
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.vllm_arguments import CPU_CACHE_BYTES, engine_arguments, lora_rank

GPU = EngineSettings(
    model="org/model",
    revision="abc",
    device="cuda",
    dtype="bfloat16",
    max_model_len=2048,
    max_lora_rank=24,
    max_loras=3,
    tensor_parallel_size=2,
    data_parallel_size=4,
    gpu_memory_utilization=0.7,
    enable_prefix_caching=False,
    trust_remote_code=True,
    reasoning_parser="qwen3",
    seed=5,
)
CPU = dataclasses.replace(GPU, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("rank", "accepted"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (257, 320), (321, 512), (512, 512)]
)
def test_ranks_are_rounded_up(rank: int, accepted: int) -> None:
    assert lora_rank(rank) == accepted


def test_a_rank_above_all_names_the_key_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match="lora_r: 513") as caught:
        lora_rank(513)
    assert "transformers" in caught.value.do


def test_every_setting_reaches_vllm() -> None:
    arguments = engine_arguments(GPU, "/models/m")
    expected = {
        "model": "/models/m",
        "dtype": "bfloat16",
        "seed": 5,
        "max_model_len": 2048,
        "tensor_parallel_size": 2,
        "data_parallel_size": 4,
        "gpu_memory_utilization": 0.7,
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "trust_remote_code": True,
        "reasoning_parser": "qwen3",
        "enable_lora": True,
        "max_lora_rank": 32,
        "max_loras": 3,
        "max_cpu_loras": 3,
        "logprobs_mode": "processed_logprobs",
    }
    assert expected.items() <= arguments.items()


def test_without_an_adapter_no_lora_is_set_up() -> None:
    assert "enable_lora" not in engine_arguments(dataclasses.replace(GPU, max_lora_rank=0), "m")


def test_a_gpu_keeps_vllms_own_scheduling() -> None:
    assert not {"enable_chunked_prefill", "max_num_batched_tokens", "block_size"} & set(engine_arguments(GPU, "m"))


def test_a_slot_stays_empty_on_a_cpu() -> None:
    arguments = engine_arguments(CPU, "m")
    assert (arguments["max_loras"], arguments["max_cpu_loras"]) == (CPU.max_loras + 1, CPU.max_loras + 1)


@pytest.mark.parametrize(("max_model_len", "step_tokens"), [(256, 4096), (8192, 8192)])
def test_a_cpu_prefills_prompts_in_one_piece(max_model_len: int, step_tokens: int) -> None:
    arguments = engine_arguments(dataclasses.replace(CPU, max_model_len=max_model_len), "m")
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] == step_tokens
    assert arguments["enforce_eager"] is True


def test_the_cache_on_a_cpu_has_a_size() -> None:
    assert engine_arguments(CPU, "m")["kv_cache_memory_bytes"] == CPU_CACHE_BYTES
    given = dataclasses.replace(CPU, kv_cache_bytes=123 << 20)
    assert engine_arguments(given, "m")["kv_cache_memory_bytes"] == 123 << 20
