"""`axolotl train` with prefetching, streaming, replay and re-roll over a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from axolotl.core.run.journal import read_journal
from tests.support.cli import free_port, running
from tests.support.project import make_project, metrics

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 6


def project(directory: Path, model: Path, **overrides: Any) -> None:
    settings: dict[str, Any] = {
        "trl__use_vllm": True,
        "trl__vllm_lora_sync": True,
        "trl__use_data_producer": True,
        "vllm": {"port": free_port(), "managed": True, "engine": "transformers", "sync_dir": "sync"},
        "gradient_accumulation_steps": 2,
        "num_questions": 24,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    directory.mkdir(exist_ok=True)
    make_project(directory, model, **{**settings, **overrides})


def train(directory: Path, *flags: str, **environment: str) -> tuple[int, str]:
    with running(directory, "train", "config.yaml", *flags, **environment) as run:
        return run.wait(), run.output


@pytest.mark.parametrize(
    ("options", "ages"),
    [
        ({"trl__async_prefetch": True, "trl__prefetch_depth": 3}, [0, 1, 2, 3, 3, 3]),
        ({"trl__async_prefetch": True, "trl__vllm_sync_interval": 2}, [0, 1, 2, 1, 2, 1]),
        ({"trl__async_prefetch": True, "trl__streaming_partial_batch": True}, [0, 1, 1, 1, 1, 1]),
        (
            {"trl__async_prefetch": True, "trl__vllm_lora_sync": False, "adapter": None}
            | {"lora_r": None, "lora_alpha": None, "lora_target_linear": None},
            [0, 1, 1, 1, 1, 1],
        ),
        ({"trl__async_prefetch": True, "trl__num_iterations": 2}, [0, 1, 2, 3, 2, 3]),
    ],
    ids=["depth 3", "interval 2", "streaming", "full weights", "two iterations"],
)
def test_how_old_completions_are_follows_from_the_options(
    tmp_path: Path, tiny_model: Path, options: dict[str, Any], ages: list[int]
) -> None:
    project(tmp_path, tiny_model, **options)
    code, output = train(tmp_path)
    assert code == 0, output
    assert [step["staleness/max"] for step in metrics(tmp_path / "out")] == ages
    lines = read_journal(tmp_path / "out" / "journal.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line, age in zip(lines, ages, strict=True):
        assert {version for group in line["groups"] for version in group["versions"]} == {line["step"] - age}
