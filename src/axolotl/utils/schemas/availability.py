"""Options that load and check, but whose machinery is not there yet. The commands refuse such a value with one line;
a default, set or not, is never refused. A row goes when its machinery comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import slices_per_rollout, uses_server
from axolotl.utils.schemas.scalars import Plain, show

Command = Literal["train", "vllm-serve"]


@dataclass(frozen=True)
class Row:
    """key: dotted option. is_refused: whether its value needs what is not there. instead: what to do for now."""

    key: str
    is_refused: Callable[[Any, AxolotlConfig], bool]
    instead: str

    def line(self, config: AxolotlConfig) -> str | None:
        value: Any = config
        for name in self.key.split("."):
            value = getattr(value, name)
        if not self.is_refused(value, config):
            return None
        shown = show(Plain(value) if isinstance(value, str) else value)
        return f"not available yet: {self.key}: {shown} ({self.instead})"


def _set(value: Any, _: AxolotlConfig) -> bool:
    return bool(value)


def _another_group_size(value: int | None, config: AxolotlConfig) -> bool:
    return value not in (None, config.trl.num_generations)


def _has_reward_model(value: list[str] | None, _: AxolotlConfig) -> bool:
    return any("/" in entry or Path(entry).is_dir() for entry in value or ())


def _compares_all(config: AxolotlConfig) -> bool:
    """Whether advantages compare the completions of all ranks."""
    return config.trl.scale_rewards == "batch" or config.trl.multi_objective_aggregation == "normalize_then_sum"


TRAINING: tuple[Row, ...] = (
    Row("trl.vllm_mode", lambda value, _: value == "colocate", "set server, or leave it out"),
    Row("trl.vllm_enable_sleep_mode", _set, "it belongs to vllm_mode: colocate; leave it out"),
    Row("trl.reward_num_workers", lambda value, _: value > 1, "set 1: rewards run in the trainer"),
    Row("trl.reward_funcs", _has_reward_model, "name reward functions as module.function; reward models come later"),
    Row("trl.rollout_func", _set, "leave it out"),
    Row("trl.num_generations_eval", _another_group_size, "leave it out: evaluation uses num_generations"),
    Row("trl.use_liger_loss", _set, "set false: log-probs are computed in chunks already"),
    Row("lora_model_dir", _set, "leave it out: a run starts with a fresh adapter"),
    Row("streaming", _set, "set false"),
    Row("fp8", _set, "set false"),
    Row("gradient_checkpointing", lambda value, _: isinstance(value, str), "set true"),
    Row("early_stopping_patience", _set, "leave it out"),
    Row("fsdp", _set, "leave it out: every process holds the whole model"),
    Row("fsdp_config", _set, "leave it out: every process holds the whole model"),
    Row("deepspeed", _set, "leave it out: every process holds the whole model"),
)

# What several processes that train together cannot do yet.
SEVERAL_RANKS: tuple[Row, ...] = (
    Row("ddp_backend", lambda value, _: value not in (None, "gloo"), "leave it out"),
    Row("val_set_size", _set, "set 0"),
    Row("torch_compile", lambda value, _: value is True, "set false"),
    Row("trl.log_completions", _set, "set false"),
    Row("trl.top_entropy_quantile", lambda value, _: value not in (None, 1.0), "leave it out"),
    Row("trl.entropy_coef", _set, "leave it out"),
    Row("trl.sync_ref_model", _set, "set false"),
    Row("trl.streaming_partial_batch", lambda value, config: value and slices_per_rollout(config) > 1, "set false"),
    Row("trl.replay_buffer_size", lambda value, config: value and _compares_all(config), "set 0"),
    Row("trl.vllm_lora_sync", lambda value, config: not value and uses_server(config), "set true"),
)

SERVING: tuple[Row, ...] = ()


def not_available(config: AxolotlConfig, command: Command) -> list[str]:
    """One line for each value that `command` cannot honour yet."""
    rows = TRAINING if command == "train" else SERVING
    lines = [line for row in rows if (line := row.line(config)) is not None]
    world_size = os.environ.get("WORLD_SIZE", "1")
    if command == "train" and world_size not in ("", "1"):
        lines += [f"{line}, or start one process" for row in SEVERAL_RANKS if (line := row.line(config)) is not None]
        lines += _launch()
    return lines


def _launch() -> list[str]:
    """What is not there of the ways in which a launcher can start several processes."""
    world_size, local = os.environ["WORLD_SIZE"], os.environ.get("LOCAL_WORLD_SIZE")
    if "RANK" not in os.environ:
        return [f"not available: WORLD_SIZE={world_size} without a launcher (start it with torchrun)"]
    lines = []
    if local is not None and local != world_size:
        lines.append(f"not available yet: several machines: {local} of {world_size} processes here (use one)")
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("true", "1"):
            lines.append(f"not available yet: {name} by accelerate (start it with torchrun: DDP)")
    return lines
