"""What may change on resume."""

from __future__ import annotations

from typing import Any

import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.core.run.checkpoints import settings
from axolotl.core.run.checkpoints.settings import Changes, compare, record
from axolotl.utils.schemas.config import AxolotlConfig

BASE: dict[str, Any] = {
    "base_model": "m",
    "rl": "grpo",
    "adapter": "lora",
    "lora_r": 8,
    "trl": {"reward_funcs": ["r.f"], "num_generations": 2},
    "datasets": [{"path": "a.jsonl"}],
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 10,
    "learning_rate": 1e-5,
}


def changes(was: dict[str, Any] | None = None, **now: Any) -> Changes:
    before, after = (config_from_mapping(given) for given in ({**BASE, **(was or {})}, {**BASE, **(was or {}), **now}))
    return compare(record(before.model_dump(mode="json")), record(after.model_dump(mode="json")))


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({"lora_r": 16}, "lora_r: 8 -> 16"),
        ({"seed": 1}, "seed: 42 -> 1"),
        ({"base_model": "n"}, "base_model: m -> n"),
        ({"datasets": [{"path": "b.jsonl"}]}, "datasets.0.path: a.jsonl -> b.jsonl"),
        ({"trl": {**BASE["trl"], "beta": 0.5}}, "trl.beta: 0.0 -> 0.5"),
        ({"weight_decay": 0.1}, "weight_decay: 0.0 -> 0.1"),
    ],
)
def test_another_run_is_refused(now: dict[str, Any], line: str) -> None:
    assert changes(**now) == Changes((line,), ())


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({"max_steps": 20}, "max_steps: 10 -> 20"),
        ({"max_steps": 9}, "max_steps: 10 -> 9"),
        ({"metric_for_best_model": "reward"}, "metric_for_best_model: null -> reward"),
        ({"learning_rate": 1e-6}, "learning_rate: 1e-05 -> 1e-06"),
        ({"save_steps": 3}, "save_steps: null -> 3"),
        ({"vllm": {"port": 8001}}, "vllm.port: 8000 -> 8001"),
        ({"output_dir": "elsewhere"}, "output_dir: ./model-out -> elsewhere"),
        ({"wandb_project": "p"}, "wandb_project: null -> p"),
    ],
)
def test_what_does_not_touch_the_training_may_change(now: dict[str, Any], line: str) -> None:
    found = changes(**now)
    assert found.refused == () and line in found.allowed


def test_a_step_may_be_cut_into_other_micro_batches_but_not_hold_more() -> None:
    same = changes(micro_batch_size=2, gradient_accumulation_steps=4)
    assert same.refused == () and len(same.allowed) == 2
    assert changes(micro_batch_size=2).refused == ("micro_batch_size: 4 -> 2",)


def test_the_same_config_has_no_changes() -> None:
    assert changes() == Changes((), ())


def test_processes_and_data_count() -> None:
    config = config_from_mapping(BASE).model_dump(mode="json")
    assert compare(record(config), record(config, num_processes=2)).refused == ("number of processes: 1 -> 2",)
    (line,) = compare(record(config, data="a"), record(config, data="b")).refused
    assert line.startswith("datasets: ")
    assert compare(record(config, data="a"), record(config)).refused == (), "not read yet"


def test_every_key_that_is_free_exists() -> None:
    """A key that was renamed would count as one that matters, and nobody would know why."""
    dump = config_from_mapping(BASE).model_dump(mode="json")
    known = (
        set(AxolotlConfig.model_fields)
        | {f"trl.{name}" for name in dump["trl"]}
        | {f"vllm.{name}" for name in dump["vllm"]}
    )
    named = settings._FREE | settings._NOT_FREE | settings._APPLIED | set(settings._SPLIT)
    assert named <= known, named - known
