"""From the config to the engine's settings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.errors import ConfigError
from axolotl.scripts.serve_settings import (
    EngineChoice,
    choose_engine,
    cpu_cache_bytes,
    engine_settings,
    max_adapters,
    resolve_model,
    without_effect,
)
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import versions_alive

CPU = EngineChoice("transformers", "", "cpu")
GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    config = {"max_position_embeddings": 2048, "dtype": "bfloat16"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def make(model: Path, vllm: dict[str, Any] | None = None, **options: Any) -> AxolotlConfig:
    data = {
        "base_model": str(model),
        "rl": "grpo",
        "output_dir": "out",
        "micro_batch_size": 8,
        "learning_rate": 1e-5,
        "vllm": vllm or {},
        **options,
    }
    return config_from_mapping(data, purpose="vllm-serve")


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_named_engine_is_taken(model: Path, engine: str) -> None:
    choice = choose_engine(make(model, {"engine": engine, "device": "cpu"}))
    assert (choice.name, choice.device) == (engine, "cpu")


def test_auto_is_transformers_on_a_cpu(model: Path) -> None:
    choice = choose_engine(make(model, {"device": "cpu"}))
    assert choice.name == "transformers" and "no accelerator" in choice.reason


@pytest.mark.parametrize(("is_installed", "engine"), [(True, "vllm"), (False, "transformers")])
def test_auto_is_vllm_with_an_accelerator(
    model: Path, is_installed: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_installed else None)
    assert choose_engine(make(model, {"device": "cuda"})).name == engine


def test_every_option_reaches_the_engine(model: Path) -> None:
    vllm = {
        "dtype": "float16",
        "max_model_len": 1024,
        "gpu_memory_utilization": 0.45,
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "trust_remote_code": True,
        "reasoning_parser": "qwen3",
    }
    trl = {"use_vllm": True, "vllm_lora_sync": True}
    config = make(model, vllm, adapter="lora", lora_r=24, seed=7, trl=trl)
    settings = engine_settings(config, EngineChoice("vllm", "", "cuda"), model.parent)
    assert {key: getattr(settings, key) for key in vllm} == vllm
    assert (settings.model, settings.max_lora_rank, settings.max_loras, settings.seed) == (str(model), 24, 3, 7)
    assert (settings.device, settings.kv_cache_bytes) == ("cuda", None)


def test_adapters_that_arrive_merged_need_no_room_in_the_engine(model: Path) -> None:
    config = make(model, adapter="lora", lora_r=24, trl={"use_vllm": True, "vllm_lora_sync": False})
    assert engine_settings(config, CPU, model.parent).max_lora_rank == 0


@pytest.mark.parametrize("depth", [None, 1, 2, 5])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_holds_the_versions_that_a_run_of_its_own_config_needs(
    depth: int | None, is_async: bool, model: Path
) -> None:
    trl: dict[str, Any] = {"use_vllm": True, "vllm_lora_sync": True, "async_prefetch": is_async}
    config = make(model, adapter="lora", trl=trl if depth is None else {**trl, "prefetch_depth": depth})
    # Of every step between the order and its training, the version of the next one, and the one being loaded.
    assert versions_alive(config) == (depth or 1) + 2 if is_async else 2
    assert max_adapters(config) >= versions_alive(config)


def test_what_is_unset_comes_from_the_model_and_the_device(model: Path) -> None:
    settings = engine_settings(make(model), CPU, model.parent)
    assert (settings.max_model_len, settings.dtype, settings.max_lora_rank) == (2048, "float32", 0)
    assert settings.kv_cache_bytes is not None
    assert engine_settings(make(model), EngineChoice("vllm", "", "cuda"), model.parent).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("utilization", "available", "expected"),
    [(0.9, 100 * GIB, 4 * GIB), (0.9, 10 * GIB, 2 * GIB), (0.45, 100 * GIB, 2 * GIB)],
)
def test_cache_on_a_cpu(utilization: float, available: int, expected: int) -> None:
    assert cpu_cache_bytes(utilization, available) == pytest.approx(expected, abs=2)


def test_a_length_above_the_models_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.max_model_len 4096 is above the model's limit 2048"):
        engine_settings(make(model, {"max_model_len": 4096}), CPU, model.parent)


def test_a_model_without_a_limit_needs_one(model: Path) -> None:
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no limit"):
        engine_settings(make(model), CPU, model.parent)


def test_models_are_found_beside_the_config(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("model", model.parent) == str(model)
    assert resolve_model("org/name", model.parent) == "org/name"
    monkeypatch.chdir(model.parent)
    assert resolve_model("model", Path("/elsewhere")) == "model"


@pytest.mark.parametrize(
    ("option", "value", "harmless"),
    [
        ("tensor_parallel_size", 2, 1),
        ("data_parallel_size", 2, 1),
        ("enable_prefix_caching", True, False),
        ("enforce_eager", True, False),
        ("reasoning_parser", "qwen3", None),
    ],
)
def test_what_the_transformers_engine_ignores_is_said(model: Path, option: str, value: Any, harmless: Any) -> None:
    config = make(model, {option: value})
    assert without_effect(config, "transformers") == [f"vllm.{option} has no effect with the transformers engine"]
    assert without_effect(config, "vllm") == []
    assert without_effect(make(model, {option: harmless}), "transformers") == []


@pytest.mark.parametrize(
    ("trl", "options", "choice", "is_wanted"),
    [
        ({}, {}, EngineChoice("vllm", "", "cuda"), True),
        ({"weight_sync": "nccl"}, {}, EngineChoice("vllm", "", "cuda:1"), True),
        ({}, {"adapter": "lora"}, EngineChoice("vllm", "", "cuda"), True),
        ({"weight_sync": "files"}, {}, EngineChoice("vllm", "", "cuda"), False),
        ({"vllm_lora_sync": True}, {"adapter": "lora"}, EngineChoice("vllm", "", "cuda"), False),
        ({}, {}, EngineChoice("vllm", "", "cpu"), False),
        ({}, {}, EngineChoice("transformers", "", "cuda"), False),
    ],
)
def test_the_engine_takes_weights_over_nccl_where_full_weights_go_to_vllm_on_a_gpu(
    model: Path, trl: dict[str, Any], options: dict[str, Any], choice: EngineChoice, is_wanted: bool
) -> None:
    config = make(model, trl=trl, **options)
    assert engine_settings(config, choice, model).weight_transfer is is_wanted


@pytest.mark.parametrize("choice", [EngineChoice("vllm", "r", "cpu"), EngineChoice("transformers", "r", "cuda")])
def test_a_server_that_cannot_do_what_the_config_wants_does_not_start(model: Path, choice: EngineChoice) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_settings(make(model, trl={"weight_sync": "nccl"}), choice, model)
    assert caught.value.code == "E-CFG-23" and choice.device in caught.value.why
