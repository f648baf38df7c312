"""What a user gets for a mistake: the right exit code, the key or line, the way out, and no traceback of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axolotl.cli.main import main
from tests.support.project import REWARDS, make_project


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_project(tmp_path, tiny_model)
    return tmp_path


def edit(project: Path, old: str, new: str) -> None:
    path = project / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def train(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["train", "config.yaml", *arguments])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("num_generations", "num_generation", ["trl.num_generation", "Did you mean num_generations?"]),
        ("learning_rate: 0.01", "learning_rate: 0.01\nlearning_rate: 0.02", ["learning_rate", "line"]),
        ("  num_generations", "\tnum_generations", ["tab"]),
        ("max_steps: 2", "max_steps: many", ["max_steps", "many"]),
    ],
    ids=["typo key", "duplicate key", "tab indent", "wrong type"],
)
def test_mistakes_in_the_file(
    old: str, new: str, wanted: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(project, old, new)
    code, error = train(capsys)
    assert code == 2
    assert all(text in error for text in ["config.yaml:", "ERROR E-CFG", *wanted]), error
    assert "Traceback" not in error


def test_an_empty_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "config.yaml").write_text("")
    code, error = train(capsys)
    assert code == 2 and "empty" in error and "Traceback" not in error


def test_a_missing_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "config.yaml").unlink()
    code, error = train(capsys)
    assert code == 2 and "config.yaml" in error and "Traceback" not in error


def test_a_reward_module_that_does_not_exist(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(project, "project_rewards.vowels", "no_such_module_here.vowels")
    code, error = train(capsys)
    assert code == 5 and "E-RWD-06" in error and "no_such_module_here" in error and "Traceback" not in error


def test_a_reward_function_with_a_slip_in_its_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "slip_rewards.py").write_text(REWARDS)
    edit(project, "project_rewards.vowels", "slip_rewards.vowel")
    code, error = train(capsys)
    assert code == 5 and "vowels" in error


def test_a_reward_module_that_fails_inside_its_own_import(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "broken_rewards.py").write_text("import a_package_nobody_has\n\ndef vowels(completions, **kw): ...\n")
    edit(project, "project_rewards.vowels", "broken_rewards.vowels")
    code, error = train(capsys)
    assert code == 5
    assert "a_package_nobody_has" in error and "broken_rewards.py" in error and "axolotl/" not in error


def test_a_column_that_a_reward_needs_and_nobody_has(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "needy_rewards.py").write_text(
        "def level(completions, level, **kw):\n    return [0.0] * len(completions)\n"
    )
    edit(project, "project_rewards.vowels", "needy_rewards.level")
    code, error = train(capsys)
    assert code == 4 and "E-DAT-02" in error and "'level'" in error and "answer" in error


def test_a_reward_that_raises_shows_the_users_line_and_keeps_what_was_done(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "late_rewards.py").write_text(
        "calls = []\n\ndef late(completions, **kw):\n    calls.append(1)\n"
        "    if len(calls) == 2:\n        raise KeyError('answer')\n"
        "    return [float(len(c[0]['content'])) for c in completions]\n"
    )
    edit(project, "project_rewards.vowels", "late_rewards.late")
    code, error = train(capsys, "--save_strategy", "steps", "--save_steps", "1")
    assert code == 5 and "KeyError" in error and "late_rewards.py" in error
    assert (project / "out" / "checkpoint-1" / "optimizer.pt").exists()
    assert json.loads((project / "out" / "last_error.json").read_text())["exit_code"] == 5


def test_prompts_that_are_all_too_long(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = train(capsys, "--sequence_len", "3")
    assert code == 4 and "E-DAT-04" in error and "sequence_len" in error


def test_some_prompts_that_are_too_long_are_dropped_and_counted(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (project / "questions.jsonl").open("a") as file:
        file.write(json.dumps({"question": "word " * 400, "answer": "1"}) + "\n")
    code, error = train(capsys, "--max_steps", "1")
    assert code == 0 and "dropped 1 of 13 prompts" in error, error


def test_three_prompts_where_a_batch_needs_four(
    project: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_project(project, tiny_model, num_questions=3)
    code, error = train(capsys, "--micro_batch_size", "16")
    assert code == 4 and "3 prompts are too few: one optimizer step takes 4" in error


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("--lora_target_modules=[no_such_proj]", "no_such_proj"),
        ("--trl.vllm_guided_decoding_regex=[0-9]+", "vllm_guided_decoding_regex"),
        ("--optim_args=no_such_arg=1", "optim_args"),
    ],
)
def test_what_the_libraries_refuse(option: str, wanted: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(project, "lora_target_linear: true\n", "")
    code, error = train(capsys, option)
    assert code == 2 and wanted in error and "Traceback" not in error


def test_a_batch_that_cuts_a_group(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = train(capsys, "--micro_batch_size", "3", "--gradient_accumulation_steps", "2")
    assert code == 2 and "micro_batch_size" in error and "num_generations" in error


def test_a_model_that_is_not_there(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = train(capsys, "--base_model", "./no-such-model")
    assert code == 2 and "no-such-model" in error and "Traceback" not in error


@pytest.mark.parametrize("keeps_best", [False, True])
def test_a_metric_that_no_evaluation_measures(
    keeps_best: bool, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was trained until the first evaluation is kept, whether or not a save was due."""
    options = ["--metric_for_best_model", "foo", "--val_set_size", "2", "--eval_steps", "1"]
    if keeps_best:
        options += ["--load_best_model_at_end", "true", "--save_strategy", "steps", "--save_steps", "1"]
    code, error = train(capsys, *options)
    assert code == 2 and "ERROR E-CFG-15" in error and "Traceback" not in error, error
    assert "eval_reward" in error and "eval_rewards/vowels/mean" in error
    assert (project / "out" / "checkpoint-1" / "optimizer.pt").exists() and "checkpoint-1" in error
    assert json.loads((project / "out" / "last_error.json").read_text())["code"] == "E-CFG-15"

    options[1] = "rewards/vowels/mean"
    code, error = train(capsys, *options, "--resume")
    assert code == 0, error


def test_a_project_name_that_wandb_refuses(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="pip install axolotl[wandb]")
    for name, value in {"WANDB_DIR": str(project), "WANDB_PROJECT": "", "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)  # so that what the run sets is taken back
    code, error = train(capsys, "--wandb_project", "a/b")
    assert code == 3 and "ERROR E-ENV-11" in error and "a/b" in error and "Traceback" not in error, error
