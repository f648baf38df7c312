"""`metric_for_best_model` against what an evaluation measured, called as transformers calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from axolotl.core.run.best_metric import RequireBestMetric
from axolotl.errors import ConfigError

MEASURED = {"eval_loss": 0.5, "eval_reward": float("nan"), "eval_kl": None, "epoch": 1.0}


def evaluate(directory: Path, metric: str | None) -> None:
    args = TrainingArguments(output_dir=str(directory), use_cpu=True, report_to=[], metric_for_best_model=metric)
    RequireBestMetric().on_evaluate(args, TrainerState(global_step=4), TrainerControl(), metrics=dict(MEASURED))


@pytest.mark.parametrize("metric", [None, "loss", "eval_loss", "reward", "eval_reward"])
def test_a_metric_that_is_measured(tmp_path: Path, metric: str | None) -> None:
    evaluate(tmp_path, metric)


@pytest.mark.parametrize("metric", ["foo", "eval_foo", "epoch", "kl"])
def test_a_metric_that_is_not_measured_or_has_no_value(tmp_path: Path, metric: str) -> None:
    with pytest.raises(ConfigError) as problem:
        evaluate(tmp_path, metric)
    error = problem.value
    assert (error.exit_code, error.code, error.why) == (2, "E-CFG-15", "it measures eval_loss, eval_reward")
    assert f"metric_for_best_model: {metric} is" in error.what and "step 4" in error.what
