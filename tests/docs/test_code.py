"""Code in the docs works: Python runs, YAML loads as a config, generated pages are current."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from axolotl.cli.config import load_config
from axolotl.utils.schemas.availability import not_available
from tests.docs.pages import ROOT, Block, blocks

# What a fragment is put on top of: a config that is complete without it.
BASE = {
    "base_model": "some/model",
    "rl": "grpo",
    "adapter": "lora",
    "datasets": [{"path": "train.jsonl"}],
    "trl": {"reward_funcs": ["rewards.score"], "use_vllm": True, "vllm_lora_sync": True},
    "micro_batch_size": 8,
}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.place)
def test_yaml_is_a_config_that_train_takes(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(block.text)
    written = yaml.safe_load(block.text)
    if "base_model" not in written:
        path.write_text(json.dumps(merged(BASE, written)))
    loaded = load_config(path)
    assert loaded.warnings == ()
    assert not_available(loaded.config, "train") == []


@pytest.mark.parametrize("config", sorted((ROOT / "examples").glob("*/config.yaml")), ids=lambda path: path.parent.name)
def test_examples_are_configs_that_train_takes(config: Path) -> None:
    loaded = load_config(config)
    assert loaded.warnings == ()
    assert not_available(loaded.config, "train") == []
    functions = runpy.run_path(str(config.with_name("rewards.py")))
    named = [*(loaded.config.trl.reward_funcs or ()), *(entry.type for entry in loaded.config.datasets)]
    assert all(callable(functions[str(path).removeprefix("rewards.")]) for path in named)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_python_runs(block: Block) -> None:
    """The block is a module: its top level runs, and each function in it that scores completions returns numbers."""
    space: dict[str, Any] = {"__name__": "docs"}
    exec(compile(block.text, block.place, "exec"), space)
    completions = [[{"role": "assistant", "content": text}] for text in ("It is 42.", "please", "")]
    for function in space.values():
        if callable(function) and getattr(function, "__module__", None) == "docs" and takes_completions(function):
            scores = function(completions=completions, answer=["42", "7", "1"])
            assert len(scores) == 3
            assert all(isinstance(score, float) for score in scores)


def takes_completions(function: Any) -> bool:
    return function.__code__.co_varnames[:1] == ("completions",)


def test_generated_parts_are_current() -> None:
    """`make docs` writes them anew."""
    generate = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))
    page = generate["CONFIGURATION"]
    assert page.read_text() == generate["render"](page.read_text())
