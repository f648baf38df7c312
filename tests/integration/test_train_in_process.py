"""`axolotl train` without a server, called through its entry point inside this process to save the imports."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from axolotl.cli.main import main
from axolotl.core.trainers.grpo.microbatch import MicroBatch
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.errors import Interrupted
from tests.support.project import make_project, metrics


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_project(tmp_path, tiny_model)
    return tmp_path


def adapter(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_writes_what_it_promises(project: Path) -> None:
    assert main(["train", "config.yaml"]) == 0
    out = project / "out"
    steps = metrics(out)
    assert [entry["step"] for entry in steps] == [1, 2]
    wanted = {
        "reward",
        "reward_std",
        "rewards/vowels/mean",
        "completions/mean_length",
        "entropy",
        "grad_norm",
        "num_tokens",
    }
    assert wanted <= steps[0].keys()
    assert any(value.abs().max() > 0 for name, value in adapter(out).items() if "lora_B" in name)
    assert not (out / "last_error.json").exists()


def test_a_second_run_needs_a_decision_and_overwrite_keeps_foreign_files(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "config.yaml"]) == 0
    (project / "out" / "notes.txt").write_text("mine")
    assert main(["train", "config.yaml"]) == 2
    assert "E-CFG-30" in capsys.readouterr().err
    assert main(["train", "config.yaml", "--overwrite"]) == 0
    assert (project / "out" / "notes.txt").read_text() == "mine"
    assert [entry["step"] for entry in metrics(project / "out")] == [1, 2]


def test_resume_goes_on_as_if_nothing_had_happened(project: Path) -> None:
    assert main(["train", "config.yaml", "--max_steps", "4", "--output_dir", "whole"]) == 0
    arguments = ["train", "config.yaml", "--output_dir", "parts", "--save_steps", "2", "--save_strategy", "steps"]
    assert main([*arguments, "--max_steps", "2"]) == 0
    assert main([*arguments, "--max_steps", "4", "--resume"]) == 0
    assert equal(adapter(project / "whole"), adapter(project / "parts"))
    assert [entry["step"] for entry in metrics(project / "parts")] == [1, 2, 3, 4]
    assert metrics(project / "parts")[3]["reward"] == metrics(project / "whole")[3]["reward"]


def test_a_finished_run_is_not_trained_further(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = ["--save_strategy", "steps", "--save_steps", "1"]
    assert main(["train", "config.yaml", *saved]) == 0
    before = adapter(project / "out")
    assert main(["train", "config.yaml", *saved, "--resume"]) == 0
    assert "nothing left to train" in capsys.readouterr().err
    assert equal(before, adapter(project / "out")) and not (project / "out" / "checkpoint-3").exists()
    assert main(["train", "config.yaml", *saved, "--resume", "--lora_r", "4"]) == 2
    assert "lora_r: 8 -> 4" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["lora", "null"])
@pytest.mark.parametrize("state", ["missing", "half written", "of an earlier end"])
def test_a_run_that_ended_between_its_last_step_and_its_save_is_saved(state: str, kind: str, project: Path) -> None:
    arguments = ["train", "config.yaml", "--save_strategy", "steps", "--save_steps", "1", "--adapter", kind]
    assert main(arguments) == 0
    out = project / "out"
    weights = out / ("adapter_model.safetensors" if kind == "lora" else "model.safetensors")
    # A copy: what is loaded is the file itself, mapped.
    saved = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    (out / "last_error.json").write_text("{}")
    if state == "of an earlier end":
        (out / "checkpoint-1" / weights.name).rename(weights)
        os.utime(out / "training_args.bin", (0, 0))
    else:
        (out / "training_args.bin").unlink()
        weights.unlink() if state == "missing" else weights.write_bytes(b"half")
    assert main([*arguments, "--resume"]) == 0
    assert equal(load_file(weights), saved) and (out / "training_args.bin").is_file()
    assert not (out / "last_error.json").exists()


def test_an_earlier_checkpoint_does_not_replace_the_final_model(project: Path) -> None:
    saved = ["--save_strategy", "steps", "--save_steps", "1"]
    assert main(["train", "config.yaml", *saved]) == 0
    before = adapter(project / "out")
    assert main(["train", "config.yaml", *saved, "--max_steps", "1", "--resume=out/checkpoint-1"]) == 0
    assert equal(before, adapter(project / "out"))


@pytest.mark.parametrize("kind", ["lora", "null"])
def test_weights_that_diverge_end_with_their_own_code(
    kind: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "config.yaml", "--learning_rate", "1e30", "--max_steps", "4", "--adapter", kind]) == 8
    error = capsys.readouterr().err
    assert "E-NUM" in error and "learning_rate" in error and "Traceback" not in error


def test_weights_that_diverge_in_the_last_step_are_not_saved(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "config.yaml", "--learning_rate", "1e39", "--max_steps", "1"]) == 8
    error = capsys.readouterr().err
    assert "E-NUM-02" in error and "after step 1" in error and "Traceback" not in error
    assert not (project / "out" / "adapter_model.safetensors").exists()


def test_resume_without_a_checkpoint_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "config.yaml", "--resume"]) == 2
    assert "there is no checkpoint in out" in capsys.readouterr().err


def test_evaluation_goes_through_the_same_path(project: Path) -> None:
    assert (
        main(["train", "config.yaml", "--val_set_size", "0.25", "--eval_steps", "2", "--eval_strategy", "steps"]) == 0
    )
    lines = (project / "out" / "metrics.jsonl").read_text()
    assert '"eval_reward"' in lines and '"eval_rewards/vowels/mean"' in lines


JUDGE = """
def judge(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step == 1) + 0.1 * (index % 2) for index in range(len(completions))]
"""


def test_interrupted_in_its_last_evaluation_a_run_ends_with_the_best_policy(
    project: Path, trainers: list[AxolotlGRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "judge_rewards.py").write_text(JUDGE)
    evaluate = AxolotlGRPOTrainer.prediction_step

    def interrupted(trainer: AxolotlGRPOTrainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 3:
            raise Interrupted("stopped by a signal while waiting for the server", signal_number=signal.SIGTERM)
        return evaluate(trainer, *args, **kwargs)

    monkeypatch.setattr(AxolotlGRPOTrainer, "prediction_step", interrupted)
    rhythm = ["--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
    best = ["--val_set_size", "0.25", "--load_best_model_at_end", "true", "--metric_for_best_model", "eval_reward"]
    rewards = ["--trl.reward_funcs", "[judge_rewards.judge]", "--max_steps", "3"]
    assert main(["train", "config.yaml", *rhythm, *best, *rewards]) == 0
    out = project / "out"
    assert trainers[0].state.best_model_checkpoint == "out/checkpoint-1"
    assert equal(adapter(out), adapter(out / "checkpoint-1"))
    assert not equal(adapter(out), adapter(out / "checkpoint-3")), "which the interruption saved"


def test_out_of_memory_twice_ends_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []

    def run(trainer: AxolotlGRPOTrainer, model: object, micro_batch: MicroBatch) -> torch.Tensor:
        sizes.append(len(micro_batch.rows))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(AxolotlGRPOTrainer, "_run", run)
    assert main(["train", "config.yaml"]) == 10
    said = capsys.readouterr().err
    assert sizes == [4, 2] and "goes on, with 2" in said
    assert "E-MEM-01" in said and "logits [2, 9, 384] = 27.6 kB" in said and "lower micro_batch_size to 1 " in said


def test_full_fine_tuning_in_process(project: Path, tiny_model: Path) -> None:
    assert main(["train", "config.yaml", "--adapter", "null", "--learning_rate", "1e-3"]) == 0
    trained, base = (load_file(place / "model.safetensors") for place in (project / "out", tiny_model))
    assert any(not torch.equal(trained[name], base[name]) for name in base)


@pytest.mark.parametrize("option", ["--trl.beta=0.1", "--bf16=true", "--gradient_checkpointing=true"])
def test_options_run(option: str, project: Path) -> None:
    assert main(["train", "config.yaml", "--max_steps", "1", option]) == 0
    (step,) = metrics(project / "out")
    assert ("kl" in step) == option.startswith("--trl.beta")


def test_completions_are_logged_when_asked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trl.log_completions", "true", "--trl.num_completions_to_print", "2", "--max_steps", "1"]
    assert main(["train", "config.yaml", *arguments]) == 0
    assert "What is" in capsys.readouterr().out
    assert list((project / "out" / "completions").glob("*.parquet"))
    assert main(["train", "config.yaml", *arguments, "--overwrite"]) == 0
