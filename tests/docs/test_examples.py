"""The parts of examples/ that are not the training itself."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / name))


def answers(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_held_out_sums_are_not_trained_on() -> None:
    train, heldout = example("quickstart/make_data.py")["split"]()
    sums = [{frozenset(row["question"].strip("?").split()[2::2]) for row in rows} for rows in (train, heldout)]
    assert not sums[0] & sums[1]
    assert len(train) + len(heldout) == 400
    assert {"question": "What is 3 + 4?", "answer": "7"} in train + heldout
    assert len({row["question"] for row in train + heldout}) == 400


def test_questions_are_written_as_lines(tmp_path: Path) -> None:
    train, heldout = example("quickstart/make_data.py")["write"](tmp_path)
    assert (train.name, heldout.name) == ("train.jsonl", "heldout.jsonl")
    assert set(json.loads(train.read_text().splitlines()[0])) == {"question", "answer"}


def test_the_last_number_counts() -> None:
    rewards = example("quickstart/rewards.py")
    completions = answers("12", "7 + 5 = 12", "12 is 7 + 5", "twelve")
    assert rewards["right_answer"](completions, answer=["12"] * 4, prompts=None) == [1.0, 1.0, 0.0, 0.0]


def test_the_transform_keeps_what_the_reward_needs() -> None:
    transform, arguments = example("quickstart/rewards.py")["to_prompt"](cfg=None)
    row = transform({"question": "What is 7 + 5?", "answer": "12"})
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["answer"] == "12"
    assert arguments == {"remove_columns": ["question"]}


def test_gsm8k() -> None:
    rewards = example("gsm8k/rewards.py")
    transform, _ = rewards["prompt_transform"](cfg=None)
    row = transform({"question": "How many?", "answer": "500 + 700 = <<500+700=1200>>1200.\n#### 1,200"})
    assert row["answer"] == "1200"
    texts = answers("<think>500 + 700</think><answer>1,200</answer>", "1200.0", "<answer>7</answer><think></think>")
    assert rewards["accuracy_reward"](texts, answer=["1200"] * 3) == [1.0, 1.0, 0.0]
    assert rewards["format_reward"](texts) == [1.0, 0.0, 0.0]


def test_the_plot_is_drawn_from_metrics(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = example("quickstart/plot.py")
    lines = [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}, {"step": 2, "train_runtime": 3.0}]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot["read_rewards"](metrics) == [(1, 0.25), (2, 0.5)]
    plot["draw"](metrics, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
