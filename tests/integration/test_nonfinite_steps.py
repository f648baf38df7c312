"""Rewards that are finite and far too large, through the whole command: skipped once, the end after three in a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from axolotl.cli.main import main
from axolotl.core.run.checkpoints.manifest import verify
from axolotl.core.run.journal import read_journal, standing
from tests.support.project import make_project, metrics

# In the steps SICK (from 0) every other completion gets REWARD, else 1; the rest nothing.
REWARDS = """
import json, os


def sometimes(completions, trainer_state, **kwargs):
    is_sick = trainer_state.global_step in json.loads(os.environ["SICK"])
    size = float(os.environ["REWARD"]) if is_sick else 1.0
    return [size * (index % 2) for index in range(len(completions))]
"""


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plain descent does not move without a gradient."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"optimizer": "sgd", "lr_scheduler": "linear", "max_steps": 4, "trl__scale_rewards": "none"}
    make_project(tmp_path, tiny_model, trl__reward_funcs=["sick_rewards.sometimes"], **options)
    (tmp_path / "sick_rewards.py").write_text(REWARDS)
    return tmp_path


@pytest.fixture
def train(project: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(name: str, sick: list[int], reward: float, *options: str) -> int:
        monkeypatch.setenv("SICK", json.dumps(sick))
        monkeypatch.setenv("REWARD", str(reward))
        return main(["train", "config.yaml", "--output_dir", name, *options])

    return run


def journal(directory: Path) -> list[dict[str, Any]]:
    return standing(read_journal(directory / "journal.jsonl"))


@pytest.mark.parametrize(("reward", "what"), [(3e38, "an advantage"), (1e30, "the gradient norm")])
def test_one_such_step_is_as_if_it_had_taught_nothing(
    train: Any, project: Path, reward: float, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("skipped", [1], reward) == 0
    assert f"step 2 is skipped: {what} is not finite" in capsys.readouterr().err
    assert train("silent", [1], 0.0) == 0
    skipped, silent = journal(project / "skipped"), journal(project / "silent")
    weights = [line["weights"] for line in skipped]
    assert weights == [line["weights"] for line in silent]
    assert weights[0] == weights[1] and len({*weights}) == 3, "the steps around it are taken"
    assert [line["ledger"]["failed"] for line in skipped] == [0, 4, 0, 0]
    assert [line["ledger"]["trained"] for line in skipped] == [4, 0, 4, 4]
    logged = metrics(project / "skipped")
    assert [line["skipped_nonfinite_steps"] for line in logged] == [0, 1, 0, 0]
    assert (logged[1]["loss"], logged[1]["grad_norm"]) == (0.0, 0.0)
    assert [line["learning_rate"] for line in logged] == [line["learning_rate"] for line in metrics(project / "silent")]
    record = json.loads((project / "skipped" / "nonfinite" / "step-2.json").read_text())
    assert record["not_finite"] == what
    assert {*record["micro_batches"][0]["prompts"]} == {group["row"] for group in skipped[1]["groups"]}
    assert train("skipped", [], 0.0, "--max_steps", "1", "--overwrite") == 0
    assert not (project / "skipped" / "nonfinite").exists(), "it is the run's own"


def test_completions_have_failed_when_none_of_their_steps_was_taken(train: Any, project: Path) -> None:
    """Two rollouts of two steps each. Those of the first one count with the second of its steps."""
    assert train("repeated", [0], 3e38, "--trl.num_iterations", "2") == 0
    lines = journal(project / "repeated")
    assert [line["ledger"]["failed"] for line in lines] == [0, 4, 0, 0]
    assert [line["ledger"]["trained"] for line in lines] == [0, 0, 0, 4]
    weights = [line["weights"] for line in lines]
    assert weights[0] == weights[1] and len({*weights}) == 3


def test_three_in_a_row_end_the_run_with_finite_weights(
    train: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("out", [1, 2, 3, 4], 3e38, "--max_steps", "6") == 8
    said = capsys.readouterr().err
    assert "E-NUM-01" in said and "checkpoint-4, resumable" in said and "Traceback" not in said
    out = project / "out"
    assert verify(out / "checkpoint-4") == []
    kept = load_file(out / "checkpoint-4" / "adapter_model.safetensors")
    assert all(bool(value.isfinite().all()) for value in kept.values())
    lines = journal(out)
    assert len({line["weights"] for line in lines}) == 1 and [line["step"] for line in lines] == [1, 2, 3, 4]
    assert json.loads((out / "last_error.json").read_text())["exit_code"] == 8
    assert train("out", [], 0.0, "--max_steps", "6", "--resume") == 0
    assert [line["step"] for line in journal(out)] == [1, 2, 3, 4, 5, 6]
    assert len({line["weights"] for line in journal(out)}) == 3
