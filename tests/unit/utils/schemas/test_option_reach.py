"""No option is accepted and ignored: every key of the guide's reference, and every further one of `trl:`, is set to
another value than its default and seen at its consumer, or refused as not available yet. A key without an entry fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from axolotl.cli import train
from axolotl.cli.config import LoadedConfig, config_from_mapping
from axolotl.core.run.signals import StopRequest
from axolotl.core.trainers.grpo import specs
from axolotl.core.trainers.grpo.args import grpo_arguments
from axolotl.core.trainers.grpo.distributed import World
from axolotl.core.trainers.grpo.rewards.loading import load_rewards
from axolotl.core.trainers.grpo.span import Span
from axolotl.core.trainers.grpo.weight_sync.transport import TrainerSide
from axolotl.data.prompts import prepare_prompts
from axolotl.loaders.precision import Precision
from axolotl.serving.link import ServerLink
from axolotl.utils.schemas.availability import not_available
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import batch_plan, server_url, uses_server
from axolotl.utils.schemas.rules.rollouts import asynchronous_options_have_a_producer, staleness_is_possible
from axolotl.utils.schemas.trl import TRLConfig
from tests.support.tiny_model import make_tiny_tokenizer

# The reference of the user guide: every key with the default it names.
GUIDE: Mapping[str, Any] = {
    "use_vllm": False,
    "vllm_mode": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": None,
    "num_generations": None,
    "generation_batch_size": None,
    "max_completion_length": None,
    "beta": None,
    "num_iterations": None,
    "epsilon": None,
    "epsilon_high": None,
    "loss_type": None,
    "scale_rewards": True,
    "mask_truncated_completions": False,
    "reward_funcs": None,
    "reward_weights": None,
    "multi_objective_aggregation": None,
    "rollout_func": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "vllm_guided_decoding_regex": None,
    "use_data_producer": False,
    "async_prefetch": False,
    "prefetch_depth": None,
    "vllm_sync_interval": None,
    "vllm_lora_sync": False,
    "streaming_partial_batch": None,
    "streaming_min_groups": None,
    "skip_zero_advantage_batches": True,
    "reward_num_workers": 1,
    "vllm_enable_sleep_mode": None,
    "vllm_importance_sampling_correction": None,
    "importance_sampling_level": None,
    "vllm_importance_sampling_mode": None,
    "vllm_importance_sampling_cap": None,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": None,
    "replay_buffer_size": 0,
    "replay_recompute_logps": True,
    "reroll_start_fraction": 1.0,
    "reroll_max_groups": 1,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 64,
    "log_completions": False,
    "num_completions_to_print": None,
    "use_liger_loss": None,
}

SERVED = {"adapter": "lora"}
WITH_SERVER = {"use_vllm": True, "vllm_lora_sync": True}


def make_config(trl: Mapping[str, Any], options: Mapping[str, Any]) -> AxolotlConfig:
    """A config that trains, with these on top."""
    base = {"base_model": "m", "rl": "grpo", "micro_batch_size": 8, "datasets": [{"path": "rows.jsonl"}]}
    return config_from_mapping({**base, **options, "trl": {"reward_funcs": ["r.one"], **trl}})


@dataclass(frozen=True)
class Reaches:
    """value: what the option is set to. consumer: reads from a config what the option decides. expected: what it must
    read then; without the option it must read something else. trl, options: what else has to be set."""

    value: Any
    consumer: Callable[[AxolotlConfig], Any]
    expected: Any
    trl: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, key: str) -> None:
        with_it = make_config({**self.trl, key: self.value}, self.options)
        assert not_available(with_it, "train") == []
        assert self.consumer(with_it) == self.expected
        without = {name: value for name, value in self.trl.items() if name != key}
        assert self.consumer(make_config(without, self.options)) != self.expected


@dataclass(frozen=True)
class Refused:
    """`train` says that `value` is not available yet; it says nothing about the default, written out."""

    value: Any
    trl: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, key: str) -> None:
        lines = not_available(make_config({**self.trl, key: self.value}, self.options), "train")
        assert any(line.startswith(f"not available yet: trl.{key}: ") for line in lines), lines
        default = getattr(make_config({}, {}).trl, key)
        assert not_available(make_config({key: default}, {}), "train") == []


def argument(name: str) -> Callable[[AxolotlConfig], Any]:
    """What TRL's `GRPOConfig` gets."""
    return lambda config: grpo_arguments(config, device="cpu", steps_per_epoch=10, autocast=None)[name]


def same_argument(key: str, value: Any, **more: Any) -> Reaches:
    return Reaches(value, argument(key), value, **more)


def sampled(name: str) -> Callable[[AxolotlConfig], Any]:
    """What the server is asked for."""
    return lambda config: getattr(specs.sampling(config), name)


def advantage(name: str) -> Callable[[AxolotlConfig], Any]:
    return lambda config: getattr(specs.advantage_spec(config, len(config.trl.reward_funcs or ())), name)


def assembly() -> ModuleType:
    """The composition root. Only what needs it pays for the import of TRL, which takes seconds."""
    from axolotl.core.trainers.grpo import assembly

    return assembly


def importance(name: str) -> Callable[[AxolotlConfig], Any]:
    return lambda config: getattr(specs.importance_spec(config), name)


def pipeline(name: str) -> Callable[[AxolotlConfig], Any]:
    """What the rollout pipeline is built with."""
    return lambda config: getattr(specs.step_spec(config), name)


def client_timeout(config: AxolotlConfig) -> float:
    """The deadline that `train` gives the client of the server."""
    given: list[float] = []

    class Noted(Exception):
        pass

    def client(url: str, directory: Path, timeout: float, **more: Any) -> Any:
        given.append(timeout)
        raise Noted

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(train, "ServerClient", client)
        with pytest.raises(Noted):
            train._connect(config, None, None, None, StopRequest(), World(), stack)  # type: ignore[arg-type]
    return given[0]


def server_restarts(config: AxolotlConfig) -> int:
    """How often `train` lets its own server be started again."""
    from axolotl.core.run.output_dir import OutputDir

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        given: dict[str, Any] = {}
        patch.setattr(
            "axolotl.serving.supervisor.ManagedServer", lambda command, **more: given.update(more) or nullcontext()
        )
        output = OutputDir.open(Path("out"), overwrite=True)
        train._start_managed_server(LoadedConfig(config, Path("c.yaml"), ()), output, None, stack)
    return int(given["max_restarts"])


def prompt_ids(config: AxolotlConfig) -> int:
    """Tokens of a prompt under a template that writes `name` out."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ name }}"
    Path("rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "2"}]}) + "\n")
    return len(prepare_prompts(config, tokenizer, Path.cwd()).train[0].ids)


def reward_names(config: AxolotlConfig) -> list[str]:
    """The functions that were imported."""
    Path("r.py").write_text("def one(**_): ...\ndef two(**_): ...\n")
    return [function.name for function in load_rewards(config, Path.cwd())]


def allows_async(config: AxolotlConfig) -> bool:
    """`use_data_producer` is what the asynchronous options ask for; rollouts come from a producer either way."""
    asked = config.model_copy(update={"trl": config.trl.model_copy(update={"async_prefetch": True})})
    return asynchronous_options_have_a_producer(asked) == []


def checks(config: AxolotlConfig) -> Any:
    """What the proof of sync is built with."""
    return sync_parts(config)[1]["check_interval"]


def sends_adapter(config: AxolotlConfig) -> bool:
    """Whether what is delivered to the server is an adapter, or all the weights."""
    return bool(sync_parts(config)[0].has_adapter)


def sync_parts(config: AxolotlConfig) -> tuple[Any, dict[str, Any]]:
    """The delivery and the keywords that `ProvenSync` gets."""
    given: list[tuple[Any, dict[str, Any]]] = []
    info = SimpleNamespace(max_model_len=64, dtype="float32")
    parts: Any = SimpleNamespace(
        config=config,
        server=ServerLink(cast(Any, SimpleNamespace(info=info)), Path("sync/adapters/run-1")),
        prompts=SimpleNamespace(train=[SimpleNamespace(ids=[1, 2, 3])]),
        precision=Precision(torch.float32, None),
        device="cpu",
        world=World(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly(), "ProvenSync", lambda delivery, *_, **more: given.append((delivery, more)))
        assembly()._weight_sync(parts, cast(Any, SimpleNamespace(policy=None)))
    return given[0]


def depth(config: AxolotlConfig) -> int:
    """Of the producer that a run with a server gets."""
    maker: Any = SimpleNamespace(make=None, backend=SimpleNamespace(is_thread_safe=True, close=None))
    parts: Any = SimpleNamespace(config=config, waiting=nullcontext)
    return assembly()._producer(parts, maker).depth


def replay(config: AxolotlConfig) -> Any:
    return assembly()._replay(config, specs.advantage_spec(config, 1), World())


def reroll(config: AxolotlConfig) -> Any:
    """In a run of ten steps."""
    return assembly()._reroll(config, 10, World())


def refusals(config: AxolotlConfig) -> int:
    """What is wrong when completions are made five steps ahead."""
    ahead = config.model_copy(update={"trl": config.trl.model_copy(update={"prefetch_depth": 5})})
    return len(staleness_is_possible(ahead))


def transport(config: AxolotlConfig) -> str:
    """How full weights travel where trainer and server are vLLM on a GPU each."""
    info = SimpleNamespace(device="cuda", weight_transports=["files", "nccl"], weight_ranks=["GPU-1"])
    server = ServerLink(cast(Any, SimpleNamespace(info=info)), Path("sync/adapters/run-1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly(), "trainer_side", lambda device: TrainerSide(device, "GPU-2", has_vllm=True))
        full = config.model_copy(update={"trl": config.trl.model_copy(update={"vllm_lora_sync": False})})
        return assembly()._transport(cast(Any, SimpleNamespace(config=full, device="cuda")), server)


PRODUCER = {"use_data_producer": True}
REPLAY = {"replay_buffer_size": 10}
REROLL = {"reroll_start_fraction": 0.5}
TABLE: dict[str, Reaches | Refused] = {
    "use_vllm": Reaches(True, uses_server, True),
    "vllm_mode": Refused("colocate"),
    "vllm_server_host": Reaches("gpu-node", server_url, "http://gpu-node:8000"),
    "vllm_server_port": Reaches(9001, server_url, "http://127.0.0.1:9001"),
    "vllm_server_timeout": Reaches(7, client_timeout, 7.0, WITH_SERVER, SERVED),
    "num_generations": Reaches(4, lambda config: batch_plan(config).prompts_per_step, 2),
    "num_generations_eval": Refused(3),
    "generation_batch_size": Reaches(2, pipeline("span"), Span(2, 1)),
    "max_completion_length": Reaches(99, sampled("max_tokens"), 99),
    "beta": same_argument("beta", 0.04),
    "num_iterations": Reaches(2, pipeline("span"), Span(1, 2)),
    "epsilon": same_argument("epsilon", 0.1),
    "epsilon_high": same_argument("epsilon_high", 0.28),
    "delta": same_argument("delta", 1.5),
    "loss_type": same_argument("loss_type", "dr_grpo"),
    "scale_rewards": Reaches(False, advantage("scale"), "none"),
    "mask_truncated_completions": Reaches(True, pipeline("mask_truncated"), True),
    "sapo_temperature_neg": same_argument("sapo_temperature_neg", 1.5),
    "sapo_temperature_pos": same_argument("sapo_temperature_pos", 1.5),
    "vespo_k_pos": same_argument("vespo_k_pos", 1.5),
    "vespo_lambda_pos": same_argument("vespo_lambda_pos", 1.5),
    "vespo_k_neg": same_argument("vespo_k_neg", 1.5),
    "vespo_lambda_neg": same_argument("vespo_lambda_neg", 1.5),
    "top_entropy_quantile": same_argument("top_entropy_quantile", 0.2),
    "entropy_coef": same_argument("entropy_coef", 0.01),
    "reward_funcs": Reaches(["r.two", "r.one"], reward_names, ["two", "one"]),
    "reward_weights": Reaches([0.5], advantage("weights"), (0.5,)),
    "multi_objective_aggregation": Reaches("normalize_then_sum", advantage("aggregation"), "normalize_then_sum"),
    "rollout_func": Refused("r.rollout"),
    "temperature": Reaches(0.7, sampled("temperature"), 0.7),
    "top_p": Reaches(0.9, sampled("top_p"), 0.9),
    "top_k": Reaches(5, sampled("top_k"), 5),
    "min_p": Reaches(0.1, sampled("min_p"), 0.1),
    "repetition_penalty": Reaches(1.1, sampled("repetition_penalty"), 1.1),
    "generation_kwargs": Reaches({"stop_token_ids": [3]}, sampled("extra"), {"stop_token_ids": [3]}),
    "chat_template_kwargs": Reaches({"name": "7"}, prompt_ids, 2),
    "vllm_guided_decoding_regex": Reaches(r"\d+", sampled("structured_regex"), r"\d+"),
    "use_data_producer": Reaches(True, allows_async, True),
    "async_prefetch": Reaches(True, depth, 1, {**WITH_SERVER, **PRODUCER}, SERVED),
    "prefetch_depth": Reaches(2, depth, 2, {**WITH_SERVER, **PRODUCER, "async_prefetch": True}, SERVED),
    "max_staleness": Reaches(3, refusals, 1, {**WITH_SERVER, **PRODUCER, "async_prefetch": True}, SERVED),
    "vllm_sync_interval": Reaches(5, pipeline("sync_interval"), 5, WITH_SERVER, SERVED),
    "vllm_lora_sync": Reaches(True, sends_adapter, True, {"use_vllm": True}, SERVED),
    "weight_sync": Reaches("files", transport, "files", WITH_SERVER, SERVED),
    "sync_check_interval": Reaches(3, checks, 3, WITH_SERVER, SERVED),
    "streaming_partial_batch": Reaches(True, pipeline("trains_early"), True, PRODUCER),
    "streaming_min_groups": Reaches(2, pipeline("groups_per_chunk"), 2, {**PRODUCER, "streaming_partial_batch": True}),
    "skip_zero_advantage_batches": Reaches(False, pipeline("skips_zero_signal"), False),
    "reward_num_workers": Refused(4),
    "vllm_enable_sleep_mode": Refused(True),
    "vllm_importance_sampling_correction": Reaches(False, specs.importance_spec, None, WITH_SERVER, SERVED),
    "importance_sampling_level": same_argument("importance_sampling_level", "sequence"),
    "vllm_importance_sampling_mode": Reaches("token_mask", importance("mode"), "token_mask", WITH_SERVER, SERVED),
    "vllm_importance_sampling_cap": Reaches(2.0, importance("cap"), 2.0, WITH_SERVER, SERVED),
    "vllm_importance_sampling_clip_max": Reaches(2.0, importance("cap"), 2.0, WITH_SERVER, SERVED),
    "vllm_importance_sampling_clip_min": Reaches(0.5, importance("floor"), 0.5, WITH_SERVER, SERVED),
    "off_policy_mask_threshold": same_argument("off_policy_mask_threshold", 0.5),
    "use_bias_correction_kl": same_argument("use_bias_correction_kl", False),
    "replay_buffer_size": Reaches(100, lambda config: replay(config) and replay(config).buffer.spec.capacity, 100),
    "replay_recompute_logps": Reaches(False, lambda config: replay(config).recomputes, False, REPLAY),
    "replay_max_age": Reaches(5, lambda config: replay(config).buffer.spec.max_age, 5, REPLAY),
    "reroll_start_fraction": Reaches(0.5, lambda config: reroll(config) and reroll(config).queue.spec.start_step, 5),
    "reroll_max_groups": Reaches(2, lambda config: reroll(config).max_groups, 2, REROLL),
    "reroll_threshold": Reaches(0.5, lambda config: reroll(config).threshold, 0.5, REROLL),
    "sync_ref_model": same_argument("sync_ref_model", True, trl={"beta": 0.1}),
    "ref_model_mixup_alpha": same_argument("ref_model_mixup_alpha", 0.5),
    "ref_model_sync_steps": same_argument("ref_model_sync_steps", 8),
    "disable_dropout": same_argument("disable_dropout", True),
    "log_completions": same_argument("log_completions", True),
    "num_completions_to_print": same_argument("num_completions_to_print", 3),
    "use_liger_loss": Refused(True),
}


def test_the_restarts_of_a_managed_server_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    managed = {**SERVED, "vllm": {"managed": True}}
    assert server_restarts(make_config(WITH_SERVER, managed)) == 5
    managed["vllm"]["max_restarts"] = 0
    assert server_restarts(make_config(WITH_SERVER, managed)) == 0


def test_every_key_of_the_guide_and_of_the_section_has_an_entry() -> None:
    assert set(GUIDE) <= set(TRLConfig.model_fields)
    assert set(TABLE) == set(TRLConfig.model_fields)


@pytest.mark.parametrize("key", GUIDE)
def test_the_guides_default_is_the_default(key: str) -> None:
    """Where the guide says null, the option may be left out or written as null, with the same result."""
    config = make_config({}, {})
    written = make_config({key: GUIDE[key] if key != "reward_funcs" else ["r.one"]}, {})
    assert written == config


@pytest.mark.parametrize("key", TABLE)
def test_it_reaches_its_consumer_or_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TABLE[key].check(key)
