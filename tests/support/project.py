"""A user's directory: config, reward module, a few questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

REWARDS = """
def vowels(completions, **kwargs):
    return [float(sum(letter in "aeiou" for letter in c[0]["content"])) for c in completions]


def prompt_transform(cfg, *args, **kwargs):
    def to_prompt(example, tokenizer=None):
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": example["answer"]}

    return to_prompt, {"remove_columns": ["question"]}
"""


def make_project(directory: Path, model: Path, *, num_questions: int = 12, **overrides: Any) -> Path:
    """Write a project that trains in seconds and return the path of its config.

    overrides: values for dotted keys, `__` for the dot: `trl__num_generations=2`.
    """
    config: dict[str, Any] = {
        "base_model": str(model),
        "rl": "grpo",
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_linear": True,
        "trl": {
            "num_generations": 4,
            "max_completion_length": 8,
            "reward_funcs": ["project_rewards.vowels"],
        },
        "vllm": {},
        "datasets": [{"path": "questions.jsonl", "type": "project_rewards.prompt_transform", "split": "train"}],
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler": "constant",
        "save_strategy": "no",
        "output_dir": "out",
    }
    for name, value in overrides.items():
        *sections, key = name.split("__")
        place = config
        for section in sections:
            place = place[section]
        place[key] = value
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (directory / "project_rewards.py").write_text(REWARDS)
    rows = [{"question": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(num_questions)]
    (directory / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "config.yaml"


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of training steps in `metrics.jsonl`."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if "loss" in entry]
