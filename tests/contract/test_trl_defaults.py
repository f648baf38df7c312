"""What an empty option of `trl:` means is what TRL means by it, apart from the differences we chose and document."""

from dataclasses import MISSING, fields
from typing import Any

import pytest
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from trl import GRPOConfig

from axolotl.core.trainers.grpo.args import grpo_arguments
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.resolve import resolve
from axolotl.utils.schemas.training import TrainingOptions

pytestmark = pytest.mark.contract

# Ours, TRL's. The reasons are in docs/grpo.qmd.
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "vllm_mode": ("server", "colocate"),
    "vllm_server_timeout": (300, 240.0),
    "vllm_importance_sampling_mode": ("token_truncate", "sequence_mask"),
    "ref_model_mixup_alpha": (0.9, 0.6),
    "ref_model_sync_steps": (64, 512),
}

# Options that TRL does not have, or has under another name.
OURS = {
    "reward_funcs",
    "rollout_func",
    "vllm_guided_decoding_regex",
    "use_data_producer",
    "async_prefetch",
    "prefetch_depth",
    "max_staleness",
    "vllm_sync_interval",
    "vllm_lora_sync",
    "streaming_partial_batch",
    "streaming_min_groups",
    "skip_zero_advantage_batches",
    "reward_num_workers",
    "replay_buffer_size",
    "replay_recompute_logps",
    "replay_max_age",
    "reroll_start_fraction",
    "reroll_max_groups",
    "reroll_threshold",
    "use_liger_loss",
    "weight_sync",
    "sync_check_interval",
}


def trl_defaults() -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(GRPOConfig)
    }


def test_an_empty_section_means_what_trl_means() -> None:
    section = resolve(AxolotlConfig(base_model="m", rl="grpo")).trl
    ours = {name: value for name, value in section.model_dump().items() if name not in OURS | {"reward_weights"}}
    theirs = trl_defaults()
    differing = {name: (value, theirs[name]) for name, value in ours.items() if value != theirs[name]}
    assert differing == DIFFERENT


def test_the_names_that_trl_lacks() -> None:
    assert not OURS & set(trl_defaults())


def test_the_optimizers_and_schedulers_are_those_of_transformers() -> None:
    schema = TrainingOptions.model_json_schema()["properties"]
    assert set(schema["optimizer"]["enum"]) == {name.value for name in OptimizerNames}
    assert set(schema["lr_scheduler"]["enum"]) == {name.value for name in SchedulerType}


def test_trl_knows_every_argument_we_pass() -> None:
    config = resolve(AxolotlConfig(base_model="m", rl="grpo", micro_batch_size=8))
    passed = grpo_arguments(config, device="cpu", steps_per_epoch=10, autocast=None)
    assert set(passed) <= set(trl_defaults())
