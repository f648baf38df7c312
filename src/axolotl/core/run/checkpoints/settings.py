"""What may change between a checkpoint and the run that goes on from it.

Going on means the run that would have been without the pause. So every setting that decides what is trained, on what,
from which random numbers, has to be as it was; a new option counts as such until it is listed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axolotl.core.run.checkpoints.store import RECORD

# Where to, how often, with what help: nothing that training computes depends on these.
_FREE = frozenset(
    {
        "auto_resume_from_checkpoints", "dataset_prepared_path", "ddp_backend", "ddp_timeout",
        "early_stopping_patience", "eval_steps", "eval_strategy", "evals_per_epoch", "gradient_checkpointing",
        "gradient_checkpointing_kwargs", "hub_model_id", "load_best_model_at_end", "logging_steps", "output_dir",
        "report_to", "resume_from_checkpoint", "save_only_model", "save_steps", "save_strategy", "save_total_limit",
        "saves_per_epoch", "torch_compile", "torch_compile_backend", "torch_compile_mode", "trackio_project_name",
        "trackio_run_name", "trackio_space_id", "trl.log_completions", "trl.num_completions_to_print",
        "trl.num_generations_eval", "trl.reward_num_workers", "trl.sync_check_interval",
        "trl.vllm_enable_sleep_mode", "trl.vllm_server_host", "trl.vllm_server_port", "trl.vllm_server_timeout",
        "trl.weight_sync", "use_tensorboard", "use_trackio", "use_wandb", "wandb_entity", "wandb_log_model",
        "wandb_mode", "wandb_name", "wandb_project", "wandb_run_id", "wandb_watch",
    }
)  # fmt: skip
# The server is found and started by these; what it serves is checked when it is claimed.
_FREE_SECTION = "vllm."
_NOT_FREE = frozenset({"vllm.max_model_len", "vllm.dtype"})

# What a resumed run takes from its config instead of its checkpoint: where it ends, the learning rate, what is best.
_APPLIED = frozenset({"greater_is_better", "learning_rate", "max_steps", "metric_for_best_model", "num_epochs"})

# The memory budget of a step; what counts is their product.
_SPLIT = ("micro_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Changes:
    """Lines `key: was -> is`. refused: a run with these is another run. allowed: for the user to see."""

    refused: tuple[str, ...]
    allowed: tuple[str, ...]


def record(config: Mapping[str, Any], *, num_processes: int = 1, data: str | None = None) -> dict[str, Any]:
    """What `run.json` in a checkpoint says about its run.

    Args:
        config: the resolved config as plain data.
        data: digest of the prompts that it trains on.
    """
    return {"config": config, "num_processes": num_processes, "data": data}


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Of a checkpoint that verifies."""
    content: dict[str, Any] = json.loads((checkpoint / RECORD).read_text())
    return content


def compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """The settings in which two records differ. A digest of the data that only one of them has is not compared."""
    before, after = _flat(_plain(was["config"])), _flat(_plain(now["config"]))
    before["number of processes"], after["number of processes"] = was["num_processes"], now["num_processes"]
    refused: list[str] = []
    allowed: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        line = f"{key}: {_shown(old)} -> {_shown(new)}"
        (allowed if _is_allowed(key, before, after) else refused).append(line)
    if None not in (was["data"], now["data"]) and was["data"] != now["data"]:
        refused.append("datasets: the prompts are others than they were, or in another order")
    return Changes(tuple(refused), tuple(allowed))


def _is_allowed(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    if key in _FREE or key in _APPLIED or (key.startswith(_FREE_SECTION) and key not in _NOT_FREE):
        return True
    if key in _SPLIT:
        return _product(before) == _product(after)
    return False


def _product(settings: Mapping[str, Any]) -> int:
    return int(settings[_SPLIT[0]] * settings[_SPLIT[1]])


def _plain(config: Mapping[str, Any]) -> Any:
    """As JSON would give it back: tuples are lists, keys are text."""
    return json.loads(json.dumps(config))


def _flat(value: Any) -> dict[str, Any]:
    """Nested mappings and lists with dotted keys: `trl.beta`, `datasets.0.path`."""
    return dict(_items(value, ""))


def _items(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        pairs = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        pairs = dict(enumerate(value)).items()
    else:
        yield key, value
        return
    for name, item in pairs:
        yield from _items(item, f"{key}.{name}" if key else str(name))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
