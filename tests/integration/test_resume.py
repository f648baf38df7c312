"""Checkpoints of real runs, in this process: damaged ones, other settings, a full disk, a second run."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from axolotl import failpoints
from axolotl.cli import train
from axolotl.cli.main import main
from axolotl.core.run.checkpoints.lock import run_lock
from axolotl.core.run.checkpoints.manifest import read_manifest, verify
from axolotl.core.run.checkpoints.store import temporaries
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from tests.support.checkpoints import DAMAGES, remove
from tests.support.project import make_project, metrics

SAVE_ALL = ("--save_strategy", "steps", "--save_steps", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The project of a run of four steps that nothing disturbed, with a checkpoint of each."""
    directory = tmp_path_factory.mktemp("whole")
    make_project(directory, tiny_model, max_steps=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.syspath_prepend(str(directory))
        assert main(["train", "config.yaml", *SAVE_ALL]) == 0
    return directory


@pytest.fixture
def stopped(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output directory as it was after three steps."""
    for name in ("config.yaml", "project_rewards.py", "questions.jsonl"):
        shutil.copy(whole / name, tmp_path)
    out = tmp_path / "out"
    shutil.copytree(whole / "out", out)
    shutil.rmtree(out / "checkpoint-4")
    (out / "adapter_model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return out


def adapter(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def same_end(out: Path, whole: Path) -> bool:
    """Weights, moments and random numbers of the last step, bit by bit; and the numbers that were logged."""
    last, expected = out / "checkpoint-4", whole / "out" / "checkpoint-4"
    left, right = adapter(out), adapter(whole / "out")
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert (last / name).read_bytes() == (expected / name).read_bytes(), name
    rewards = [(line["step"], line["reward"], line["loss"]) for line in metrics(out)]
    return rewards == [(line["step"], line["reward"], line["loss"]) for line in metrics(whole / "out")]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "trainer_state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_by_name_and_the_run_ends_as_if_nothing_had_happened(
    stopped: Path, whole: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(stopped / "checkpoint-3" / name)
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume"]) == 0
    said = capsys.readouterr().err
    assert f"skipping out/checkpoint-3: {name} " in said and "resuming from out/checkpoint-2" in said
    assert same_end(stopped, whole)
    assert verify(stopped / "checkpoint-3") == [] and verify(stopped / "checkpoint-4") == []


def test_from_the_newest_as_from_any_other(stopped: Path, whole: Path) -> None:
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume=out/checkpoint-1"]) == 0
    assert same_end(stopped, whole)
    shutil.rmtree(stopped / "checkpoint-4")
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume"]) == 0
    assert same_end(stopped, whole)


def test_a_run_killed_before_the_rename_loses_nothing(
    stopped: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stopped / ".tmp-checkpoint-3").mkdir()
    (stopped / "checkpoint-3").rename(stopped / ".tmp-checkpoint-3" / "checkpoint-3")
    (stopped / ".tmp-checkpoint-7" / "checkpoint-7").mkdir(parents=True)
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume"]) == 0
    assert "resuming from out/checkpoint-3" in capsys.readouterr().err
    assert same_end(stopped, whole) and temporaries(stopped) == []


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_run_killed_after_its_last_checkpoint_is_finished(stopped: Path, whole: Path, is_cut: bool) -> None:
    shutil.copytree(whole / "out" / "checkpoint-4", stopped / "checkpoint-4")
    if is_cut:
        (stopped / "adapter_model.safetensors").write_bytes(b"half")
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume"]) == 0
    assert same_end(stopped, whole)
    assert (stopped / "adapter_model.safetensors").read_bytes() == (
        whole / "out" / "adapter_model.safetensors"
    ).read_bytes()


def test_all_damaged_is_an_error_and_not_a_fresh_start(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        remove(stopped / f"checkpoint-{step}" / "optimizer.pt")
    assert main(["train", "config.yaml", "--resume"]) == 9
    said = capsys.readouterr().err
    assert "E-STO-03" in said and "checkpoint-1: optimizer.pt is missing" in said
    assert len(metrics(stopped)) == 4, "nothing was taken back"


def test_a_second_live_run_is_refused_and_touches_nothing(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in stopped.rglob("*")}
    with run_lock(stopped):
        for flag in ("--resume", "--overwrite"):
            assert main(["train", "config.yaml", flag]) == 2
            assert f"E-CFG-31  output_dir out is in use by another run (pid {os.getpid()} " in capsys.readouterr().err
    after = {path: path.stat().st_mtime_ns for path in stopped.rglob("*")}
    assert {path: time for path, time in after.items() if path.is_file()} == {
        path: time for path, time in before.items() if path.is_file()
    }


def test_settings_of_another_run_are_refused(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "config.yaml", "--resume", "--lora_r", "4", "--seed", "7"]) == 2
    said = capsys.readouterr().err
    assert "lora_r: 8 -> 4\nseed: 42 -> 7\n" in said and "E-CFG-32" in said
    questions = stopped.parent / "questions.jsonl"
    questions.write_text(questions.read_text().replace("What is", "How much is"))
    assert main(["train", "config.yaml", "--resume"]) == 2
    assert "datasets: the prompts are others" in capsys.readouterr().err


def test_settings_that_may_change_do_what_they_say(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = ["--learning_rate", "1e-3", "--max_steps", "6", "--save_strategy", "steps", "--save_steps", "2"]
    assert main(["train", "config.yaml", "--resume", *changed]) == 0
    said = capsys.readouterr().err
    assert "changed since then: learning_rate: 0.01 -> 0.001" in said and "save_steps: 1 -> 2" in said
    assert [line["learning_rate"] for line in metrics(stopped)] == [1e-2] * 3 + [1e-3] * 3
    assert not (stopped / "checkpoint-5").exists() and verify(stopped / "checkpoint-6") == []


def test_a_full_disk_ends_the_run_and_older_checkpoints_are_intact(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume"]) == 9
    said = capsys.readouterr().err
    assert "E-STO-01" in said and "No space left" in said and "checkpoint-3, resumable" in said
    assert not (stopped / "checkpoint-4").exists() and temporaries(stopped) == []
    assert all(verify(stopped / f"checkpoint-{step}") == [] for step in (1, 2, 3))


def test_only_so_many_are_kept_and_the_best_is_the_one_that_is_loaded(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = ["--val_set_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "1"]
    best = ["--load_best_model_at_end", "true", "--metric_for_best_model", "eval_reward", "--save_total_limit", "2"]
    assert main(["train", "config.yaml", *SAVE_ALL, *evaluated, *best, "--output_dir", "judged"]) == 0, (
        capsys.readouterr().err
    )
    out = stopped.parent / "judged"
    kept = {path.name for path in out.glob("checkpoint-*")}
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
    chosen = Path(state["best_model_checkpoint"])
    assert chosen == Path("judged") / f"checkpoint-{state['best_global_step']}"
    assert len(kept) == 2 and {chosen.name, "checkpoint-4"} <= kept
    assert all(torch.equal(adapter(out)[name], value) for name, value in adapter(chosen).items())


def test_what_the_pipeline_adds_is_part_of_the_checkpoint(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = train._build

    def with_rollouts(*parts: object) -> AxolotlGRPOTrainer:
        trainer = build(*parts)  # type: ignore[arg-type]

        def extra_state(checkpoint: Path) -> None:
            (checkpoint / "rollouts").mkdir()
            (checkpoint / "rollouts" / "rank-0.json").write_text(str(trainer.state.global_step))

        trainer.extra_state = extra_state
        return trainer

    monkeypatch.setattr(train, "_build", with_rollouts)
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume"]) == 0
    checkpoint = stopped / "checkpoint-4"
    assert (checkpoint / "rollouts" / "rank-0.json").read_text() == "4"
    assert {"rollouts/rank-0.json", "run.json", "optimizer.pt", "rng_state.pth"} <= read_manifest(checkpoint).keys()
    remove(checkpoint / "rollouts" / "rank-0.json")
    assert [problem.file for problem in verify(checkpoint)] == ["rollouts/rank-0.json"]


POINTS = sorted(point for point in failpoints.POINTS if point.startswith("ckpt."))


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_anywhere_in_a_save_costs_no_checkpoint(
    stopped: Path, whole: Path, point: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, f"{point}=raise:EIO")
    code = main(["train", "config.yaml", *SAVE_ALL, "--save_total_limit", "3", "--resume"])
    said = capsys.readouterr().err
    if point.endswith("_prune"):
        assert code == 0 and "warning: older checkpoints could not be removed" in said
    else:
        assert code == 9 and "E-STO-01" in said and "Input/output error" in said
    assert temporaries(stopped) == [] and all(verify(path) == [] for path in stopped.glob("checkpoint-*"))
    assert {"checkpoint-2", "checkpoint-3"} <= {path.name for path in stopped.glob("checkpoint-*")}
    monkeypatch.delenv(failpoints.VARIABLE)
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume"]) == 0
    assert same_end(stopped, whole)


def test_a_checkpoint_is_uploaded_when_it_is_complete(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[str] = []

    def push(trainer: Trainer, folder: str) -> None:
        assert verify(Path(folder)) == []
        uploaded.append(Path(folder).name)

    monkeypatch.setattr("axolotl.cli.main.check_accounts", lambda config, reporters: None)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda trainer, token=None: None)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda trainer, **kwargs: None)
    arguments = ["--hub_model_id", "me/model", "--max_steps", "5"]
    assert main(["train", "config.yaml", *SAVE_ALL, "--resume", *arguments]) == 0
    assert uploaded == ["checkpoint-4", "checkpoint-5"]
