"""The same for the options outside `trl:`: each is set to another value than its default and seen at its consumer, or
refused, or named here with the test that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from axolotl.cli import train
from axolotl.cli.check import summary
from axolotl.cli.config import LoadedConfig, config_from_mapping
from axolotl.core.run.checkpoints.store import checkpoints, step_of
from axolotl.core.run.output_dir import OutputDir
from axolotl.core.trainers.grpo.args import grpo_arguments, reporter_environment
from axolotl.data.prompts import prepare_prompts
from axolotl.errors import ConfigError
from axolotl.loaders.model import attention, lora_config
from axolotl.loaders.precision import resolve_precision
from axolotl.loaders.tokenizer import load_tokenizer
from axolotl.scripts.serve_settings import choose_engine, engine_settings
from axolotl.serving import supervisor
from axolotl.utils.schemas.availability import not_available
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import batch_plan, prompt_limit, server_url, sync_dir
from axolotl.utils.schemas.vllm import VllmConfig
from tests.support.checkpoints import write
from tests.support.tiny_model import make_tiny_tokenizer, tiny_config

Consumer = Callable[[AxolotlConfig], Any]


def make_config(options: Mapping[str, Any], vllm: Mapping[str, Any]) -> AxolotlConfig:
    base = {"base_model": "m", "rl": "grpo", "micro_batch_size": 8, "datasets": [{"path": "rows.jsonl"}]}
    return config_from_mapping({**base, "trl": {"reward_funcs": ["r.f"]}, **options, "vllm": vllm})


@dataclass(frozen=True)
class Reaches:
    """Set to `value`, `consumer` reads `expected`; without the option it reads something else."""

    value: Any
    consumer: Consumer
    expected: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, key: str, section: str) -> None:
        in_vllm = section == "vllm"
        more = {} if in_vllm else {key: self.value}
        config = make_config({**self.options, **more}, {key: self.value} if in_vllm else {})
        assert not_available(config, "train") == []
        assert self.consumer(config) == self.expected
        without = {name: value for name, value in self.options.items() if name != key}
        assert self.consumer(make_config(without, {})) != self.expected


@dataclass(frozen=True)
class Refused:
    value: Any

    def check(self, key: str, section: str) -> None:
        (line,) = not_available(make_config({key: self.value}, {}), "train")
        assert line.startswith(f"not available yet: {key}: ")


@dataclass(frozen=True)
class Wrong:
    """No value but the default loads."""

    value: Any

    def check(self, key: str, section: str) -> None:
        with pytest.raises(ConfigError) as caught:
            make_config({key: self.value}, {})
        assert caught.value.details[0].startswith(f"config {key}: ")


def argument(name: str, *, device: str = "cpu") -> Consumer:
    return lambda config: grpo_arguments(config, device=device, steps_per_epoch=10, autocast=None).get(name)


def same(key: str, value: Any, **options: Any) -> Reaches:
    return Reaches(value, argument(key), value, options)


def environment(name: str) -> Consumer:
    return lambda config: reporter_environment(config).get(name)


def adapter(name: str) -> Consumer:
    return lambda config: getattr(lora_config(config), name, None)


def precision(name: str, device: str = "cuda") -> Consumer:
    return lambda config: str(getattr(resolve_precision(config, device), name))


def engine(name: str) -> Consumer:
    """A setting of the engine, for the tiny model in the working directory."""

    def read(config: AxolotlConfig) -> Any:
        tiny_config().save_pretrained("m")
        return getattr(engine_settings(config, choose_engine(config), Path.cwd()), name)

    return read


def server_budget(config: AxolotlConfig) -> int:
    """The restarts that `train` gives the server it starts."""
    given: list[int] = []

    def server(*_: Any, max_restarts: int, **__: Any) -> Any:
        given.append(max_restarts)
        return nullcontext()

    managed = config.model_copy(update={"vllm": config.vllm.model_copy(update={"managed": True})})
    served = config.trl.model_copy(update={"use_vllm": True, "vllm_server_host": "127.0.0.1", "vllm_server_port": 8000})
    config = managed.model_copy(update={"trl": served})
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(supervisor, "ManagedServer", server)
        loaded = LoadedConfig(config, Path("c.yaml"), ())
        train._start_managed_server(loaded, OutputDir.open(Path("out"), overwrite=True, resume=False), None, stack)
    return given[0]


def checkpoints_kept(config: AxolotlConfig) -> list[int]:
    """Of three that a run saves."""
    with TemporaryDirectory() as directory:
        store = train._store(config, OutputDir.open(Path(directory)), "")
        for step in (1, 2, 3):
            store.prune(store.save(step, write))
        return [step_of(checkpoint) for checkpoint in checkpoints(Path(directory))]


def prompts(read: Callable[[Any], Any]) -> Consumer:
    """Something about the prompts that ten rows of increasing length make. They come with two notes, three where a
    cache is used."""

    def consume(config: AxolotlConfig) -> Any:
        rows = [json.dumps({"prompt": "2" * (number + 1)}) for number in range(10)]
        Path("rows.jsonl").write_text("\n".join(rows))
        try:
            return read(prepare_prompts(config, make_tiny_tokenizer(), Path.cwd()))
        except Exception as error:
            return type(error).__name__

    return consume


def tokenizer(read: Callable[[Any], Any], directory: str = "m") -> Consumer:
    def consume(config: AxolotlConfig) -> Any:
        for name in {"m", directory}:
            saved = make_tiny_tokenizer()
            saved.model_max_length = len(name)
            saved.save_pretrained(name)
        return read(load_tokenizer(config, Path.cwd()))

    return consume


def source_of_model(name: str) -> Consumer:
    """What `from_pretrained` is asked for."""

    def consume(config: AxolotlConfig) -> Any:
        from axolotl.loaders import model

        asked: dict[str, Any] = {}

        class Asked(BaseException):
            """Past the handler that takes every exception of a library for a broken model."""

        class Model:
            @staticmethod
            def from_pretrained(source: str, **kwargs: Any) -> Any:
                asked.update(kwargs, source=source)
                raise Asked

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "AutoModelForCausalLM", Model)
            with pytest.raises(Asked):
                model.load_model(config, make_tiny_tokenizer(), resolve_precision(config, "cpu"), "cpu")
        return asked.get(name)

    return consume


def quantization(name: str) -> Consumer:
    read = source_of_model("quantization_config")
    return lambda config: getattr(read(config), name, None)


LORA = {"adapter": "lora"}
SERVED = {**LORA, "trl": {"reward_funcs": ["r.f"], "use_vllm": True, "vllm_lora_sync": True}}
EVALUATED = {"val_set_size": 0.5}
BEST = {**EVALUATED, "load_best_model_at_end": True}

TOP_LEVEL: dict[str, Reaches | Refused | Wrong] = {
    "base_model": Reaches("other", source_of_model("source"), "other"),
    "revision_of_model": Reaches("v1.10", source_of_model("revision"), "v1.10"),
    "tokenizer_config": Reaches("other", tokenizer(lambda loaded: loaded.model_max_length, "other"), 5),
    "trust_remote_code": Reaches(True, source_of_model("trust_remote_code"), True),
    "chat_template": Reaches("X{{ 1 }}", tokenizer(lambda loaded: loaded.chat_template), "X{{ 1 }}"),
    "special_tokens": Reaches(
        {"pad_token": "<|im_start|>"}, tokenizer(lambda loaded: loaded.pad_token), "<|im_start|>"
    ),
    "attn_implementation": Reaches("flash_attention_3", lambda config: attention(config, "cuda"), "flash_attention_3"),
    "flash_attention": Reaches(True, lambda config: attention(config, "cuda"), "flash_attention_2"),
    "eager_attention": Reaches(True, lambda config: attention(config, "cuda"), "eager"),
    "load_in_4bit": Reaches(True, quantization("load_in_4bit"), True, LORA),
    "load_in_8bit": Reaches(True, quantization("load_in_8bit"), True, LORA),
    "adapter": Reaches("lora", lambda config: lora_config(config) is None, False),
    "lora_r": Reaches(4, adapter("r"), 4, LORA),
    "lora_alpha": Reaches(3, adapter("lora_alpha"), 3, LORA),
    "lora_dropout": Reaches(0.5, adapter("lora_dropout"), 0.5, LORA),
    "lora_target_modules": Reaches(["q_proj"], adapter("target_modules"), {"q_proj"}, LORA),
    "lora_target_linear": Reaches(
        True, adapter("target_modules"), "all-linear", {**LORA, "lora_target_modules": ["q_proj"]}
    ),
    "lora_modules_to_save": Reaches(["lm_head"], adapter("modules_to_save"), ["lm_head"], LORA),
    "lora_bias": Reaches("all", adapter("bias"), "all", LORA),
    "peft_init_lora_weights": Reaches("pissa", adapter("init_lora_weights"), "pissa", LORA),
    "lora_model_dir": Refused("a"),
    "peft_use_dora": Reaches(True, adapter("use_dora"), True, LORA),
    "peft_use_rslora": Reaches(True, adapter("use_rslora"), True, LORA),
    "datasets": Reaches([{"path": "rows.jsonl"}, {"path": "rows.jsonl"}], prompts(lambda data: len(data.train)), 20),
    "dataset_prepared_path": Reaches("cache", prompts(lambda data: len(data.notes)), 3),
    "skip_prepare_dataset": Reaches(
        True, prompts(lambda data: len(data.notes)), 2, {"dataset_prepared_path": "cached"}
    ),
    "streaming": Refused(True),
    "val_set_size": Reaches(4, prompts(lambda data: len(data.evaluation or ())), 4),
    "sequence_len": Reaches(99, prompt_limit, 99),
    "long_prompts": Reaches("error", prompts(lambda data: len(data.train)), "DataError", {"sequence_len": 2}),
    "micro_batch_size": Reaches(16, lambda config: batch_plan(config).micro_batch_size, 16),
    "gradient_accumulation_steps": Reaches(3, lambda config: batch_plan(config).num_micro_batches, 3),
    "num_epochs": Reaches(2, argument("num_train_epochs"), 2.0),
    "max_steps": same("max_steps", 7),
    "learning_rate": same("learning_rate", 1e-4),
    "lr_scheduler": Reaches("linear", argument("lr_scheduler_type"), "linear"),
    "lr_scheduler_kwargs": same("lr_scheduler_kwargs", {"num_cycles": 2}),
    "warmup_steps": same("warmup_steps", 5),
    "warmup_ratio": Reaches(0.1, argument("warmup_steps"), 0.1),
    "optimizer": Reaches("adafactor", argument("optim"), "adafactor"),
    "optim_args": Reaches({"a": 1}, argument("optim_args"), "a=1", {"optimizer": "sgd"}),
    "weight_decay": same("weight_decay", 0.1),
    "adam_beta1": same("adam_beta1", 0.8),
    "adam_beta2": same("adam_beta2", 0.95),
    "adam_epsilon": same("adam_epsilon", 1e-6),
    "max_grad_norm": same("max_grad_norm", 0.3),
    "seed": same("seed", 7),
    "bf16": Reaches(True, precision("autocast", "cpu"), "torch.bfloat16"),
    "fp16": Reaches(True, precision("autocast"), "torch.float16", {"bf16": False}),
    "tf32": Reaches(True, argument("tf32", device="cuda"), True),
    "fp8": Refused(True),
    "gradient_checkpointing": same("gradient_checkpointing", True),
    "gradient_checkpointing_kwargs": Reaches(
        {"use_reentrant": True}, argument("gradient_checkpointing_kwargs"), {"use_reentrant": True}
    ),
    "torch_compile": same("torch_compile", True),
    "torch_compile_backend": same("torch_compile_backend", "eager"),
    "torch_compile_mode": same("torch_compile_mode", "reduce-overhead"),
    "neftune_noise_alpha": same("neftune_noise_alpha", 5.0),
    "output_dir": same("output_dir", "out"),
    "save_strategy": same("save_strategy", "no"),
    "save_steps": same("save_steps", 3),
    "saves_per_epoch": Reaches(2, argument("save_steps"), 5),
    "save_total_limit": Reaches(2, checkpoints_kept, [2, 3]),
    "save_only_model": same("save_only_model", True),
    "load_best_model_at_end": same("load_best_model_at_end", True, **EVALUATED),
    "metric_for_best_model": same("metric_for_best_model", "eval_reward", **BEST),
    "greater_is_better": same("greater_is_better", True, **BEST),
    "eval_strategy": same("eval_strategy", "no", **EVALUATED),
    "eval_steps": same("eval_steps", 3, **EVALUATED),
    "evals_per_epoch": Reaches(2, argument("eval_steps"), 5, EVALUATED),
    "early_stopping_patience": Refused(2),
    "hub_model_id": same("hub_model_id", "a/b"),
    "logging_steps": same("logging_steps", 5),
    "report_to": Reaches(["wandb"], argument("report_to"), ["wandb"]),
    "use_wandb": Reaches(True, argument("report_to"), ["wandb"]),
    "wandb_project": Reaches("p", environment("WANDB_PROJECT"), "p"),
    "wandb_entity": Reaches("e", environment("WANDB_ENTITY"), "e"),
    "wandb_name": Reaches("n", environment("WANDB_NAME"), "n"),
    "wandb_run_id": Reaches("i", environment("WANDB_RUN_ID"), "i"),
    "wandb_mode": Reaches("offline", environment("WANDB_MODE"), "offline"),
    "wandb_watch": Reaches("all", environment("WANDB_WATCH"), "all"),
    "wandb_log_model": Reaches("end", environment("WANDB_LOG_MODEL"), "end"),
    "use_tensorboard": Reaches(True, argument("report_to"), ["tensorboard"]),
    "use_trackio": Reaches(True, argument("report_to"), ["trackio"]),
    "trackio_project_name": Reaches("p", argument("project"), "p"),
    "trackio_run_name": Reaches("n", argument("run_name"), "n"),
    "trackio_space_id": same("trackio_space_id", "a/b"),
    "fsdp": Refused(["full_shard"]),
    "fsdp_config": Refused({"a": 1}),
    "deepspeed": Refused("zero3.json"),
    "ddp_backend": same("ddp_backend", "gloo"),
    "ddp_find_unused_parameters": same("ddp_find_unused_parameters", True),
    "ddp_timeout": same("ddp_timeout", 60),
    "rl": Reaches("gdpo", lambda config: config.trl.multi_objective_aggregation, "normalize_then_sum"),
    "plugins": Wrong(["a.B"]),
}

# sdp_attention asks for what is the default. The last two are shown in tests/unit/cli/test_main.py and by the runs of
# tests/integration.
TOP_LEVEL_ELSEWHERE = {"sdp_attention", "resume_from_checkpoint", "auto_resume_from_checkpoints"}

VLLM: dict[str, Reaches] = {
    "engine": Reaches("vllm", lambda config: choose_engine(config).name, "vllm"),
    "managed": Reaches(True, lambda config: "started by train" in " ".join(summary(config)), True, SERVED),
    "max_restarts": Reaches(2, server_budget, 2),
    "sync_dir": Reaches("/mnt/sync", sync_dir, Path("/mnt/sync")),
    "port": Reaches(9001, server_url, "http://127.0.0.1:9001"),
    "device": Reaches("cuda", lambda config: choose_engine(config).device, "cuda"),
    "dtype": Reaches("bfloat16", engine("dtype"), "bfloat16"),
    "max_model_len": Reaches(
        256 * 2 - 1, engine("max_model_len"), 511, {"trl": {"reward_funcs": ["r.f"], "max_completion_length": 9}}
    ),
    "gpu_memory_utilization": Reaches(0.5, engine("gpu_memory_utilization"), 0.5),
    "tensor_parallel_size": Reaches(2, engine("tensor_parallel_size"), 2),
    "data_parallel_size": Reaches(2, engine("data_parallel_size"), 2),
    "enable_prefix_caching": Reaches(False, engine("enable_prefix_caching"), False),
    "enforce_eager": Reaches(True, engine("enforce_eager"), True),
    "trust_remote_code": Reaches(True, engine("trust_remote_code"), True),
    "reasoning_parser": Reaches("qwen3", engine("reasoning_parser"), "qwen3"),
}

# Where the server listens and what module it runs is shown by its own tests; worker_extension_cls is dropped with a
# warning (tests/unit/cli/test_config.py).
VLLM_ELSEWHERE = {"host", "serve_module", "worker_extension_cls"}


def test_every_option_has_an_entry() -> None:
    assert set(TOP_LEVEL) | TOP_LEVEL_ELSEWHERE | {"trl", "vllm"} == set(AxolotlConfig.model_fields)
    assert set(VLLM) | VLLM_ELSEWHERE == set(VllmConfig.model_fields)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("key", TOP_LEVEL)
def test_a_top_level_option_arrives(key: str) -> None:
    TOP_LEVEL[key].check(key, "")


@pytest.mark.parametrize("key", VLLM)
def test_an_option_of_the_server_arrives(key: str) -> None:
    VLLM[key].check(key, "vllm")
