"""The callbacks of a run, called as transformers calls them."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from axolotl import failpoints
from axolotl.core.run.bookkeeping import NoteWrittenFiles
from axolotl.core.run.metrics_file import KEPT_LINES, MetricsFile
from axolotl.core.run.output_dir import OutputDir
from axolotl.core.run.progress import Progress, format_line
from axolotl.core.run.resumed import FollowConfig
from axolotl.core.run.signals import StopAtBoundary, StopRequest, exit_on_sigterm
from axolotl.core.run.step_points import StepPoints
from axolotl.errors import Interrupted

CONTROL = TrainerControl()


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path_factory.mktemp("args")), use_cpu=True, report_to=[])


def state(step: int, max_steps: int = 10) -> TrainerState:
    return TrainerState(global_step=step, max_steps=max_steps)


def test_metrics_are_json_even_when_a_value_is_not_finite(tmp_path: Path, args: TrainingArguments) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).on_log(args, state(3), CONTROL, logs={"loss": math.nan, "reward": 0.5})
    assert json.loads(path.read_text()) == {"step": 3, "loss": None, "reward": 0.5}


@pytest.mark.parametrize("is_main", [True, False])
def test_the_state_keeps_the_last_lines_only(tmp_path: Path, args: TrainingArguments, is_main: bool) -> None:
    log_history = [{"step": float(step)} for step in range(1, KEPT_LINES + 4)]
    long = TrainerState(global_step=9, log_history=log_history, is_world_process_zero=is_main)
    MetricsFile(tmp_path / "metrics.jsonl").on_log(args, long, CONTROL, logs={})
    assert [entry["step"] for entry in long.log_history] == list(range(4, KEPT_LINES + 4))


def test_a_resumed_run_takes_back_steps_that_its_checkpoint_lacks(tmp_path: Path, args: TrainingArguments) -> None:
    path = tmp_path / "metrics.jsonl"
    callback = MetricsFile(path)
    for step in (1, 2, 3):
        callback.on_log(args, state(step), CONTROL, logs={"loss": 0.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    callback.on_train_begin(args, state(2), CONTROL)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_through_a_pipe_progress_is_plain_lines(args: TrainingArguments) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.on_train_begin(args, state(0), CONTROL)
    progress.on_step_end(args, state(1), CONTROL)
    progress.on_log(args, state(1), CONTROL, logs={"loss": 0.25, "reward": 0.5, "reward_std": 0.1})
    progress.on_train_end(args, state(1), CONTROL)
    assert stream.getvalue().startswith("step 1/10  reward 0.5 (std 0.1)  loss 0.25")
    assert stream.getvalue().count("\n") == 1 and "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_on_a_terminal_progress_is_a_bar(args: TrainingArguments) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(stream)
    progress.on_train_begin(args, state(0), CONTROL)
    progress.on_step_end(args, state(1), CONTROL)
    progress.on_train_end(args, state(1), CONTROL)
    assert "1/10" in stream.getvalue()


def test_time_left_is_the_rest_at_the_pace_so_far() -> None:
    assert format_line({"loss": 0.0}, 2, 10, 12.0).endswith("12.0 s/step  1:36 left")
    assert format_line({"loss": 0.0}, 1, 1001, 12.0).endswith("3:20:00 left")


def test_checkpoints_are_noted_as_ours(tmp_path: Path, args: TrainingArguments) -> None:
    output = OutputDir.open(tmp_path / "out")
    checkpoint = output.path / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "optimizer.pt").write_text("")
    NoteWrittenFiles(output).on_save(args, state(4), CONTROL)
    OutputDir.open(output.path, overwrite=True)
    assert not checkpoint.exists()


def resumed(args: TrainingArguments, old: TrainerState, rate: float) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Optimizer and schedule as a checkpoint after two steps at a tenth of 1e-2 has them, and its state."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 10)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    args = dataclasses.replace(args, learning_rate=rate, save_steps=3)
    FollowConfig().on_train_begin(args, old, CONTROL, optimizer=optimizer, lr_scheduler=schedule)
    return optimizer, schedule


def test_a_resumed_run_follows_the_intervals_and_the_rate_of_its_config(args: TrainingArguments) -> None:
    old = TrainerState(global_step=2, max_steps=10, save_steps=500)
    optimizer, schedule = resumed(args, old, rate=1e-3)
    assert old.save_steps == 3
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == pytest.approx(0.8e-3)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.7e-3)


def test_what_was_best_by_another_metric_is_forgotten(args: TrainingArguments) -> None:
    for is_forgotten, best in ((False, 3), (True, None)):
        state = TrainerState(max_steps=10, best_metric=0.5, best_global_step=3, best_model_checkpoint="checkpoint-3")
        FollowConfig(is_best_forgotten=is_forgotten).on_train_begin(args, state, CONTROL)
        assert state.best_global_step == best and (state.best_metric is None) == is_forgotten


def test_a_rate_that_is_the_same_is_not_touched(args: TrainingArguments) -> None:
    optimizer, schedule = resumed(args, TrainerState(max_steps=10), rate=1e-2)
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.8 and schedule.base_lrs == [1e-2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_for_a_save_and_a_stop_at_the_boundary(number: int, args: TrainingArguments) -> None:
    stop = StopRequest()
    callback = StopAtBoundary(stop)
    control = TrainerControl()
    before = signal.getsignal(number)
    with stop.listening():
        callback.on_step_end(args, state(1), control)
        assert not control.should_training_stop
        os.kill(os.getpid(), number)
        callback.on_step_end(args, state(1), control)
    assert control.should_training_stop and control.should_save
    assert signal.getsignal(number) is before


def test_a_second_interrupt_leaves_at_once() -> None:
    stop = StopRequest()
    with pytest.raises(Interrupted) as ended, stop.listening():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert ended.value.exit_code == 130


def test_before_training_sigterm_unwinds_the_program() -> None:
    with pytest.raises(Interrupted) as ended, exit_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.exit_code == 143


@pytest.mark.parametrize("point", ["step.before_opt", "step.after_opt"])
def test_failpoints_are_around_the_optimizer(point: str, tmp_path: Path) -> None:
    """As a real optimizer step calls the callbacks of a trainer."""
    layer = torch.nn.Linear(1, 1)
    before = layer.weight.item()
    data = [{"input": torch.ones(1)}]

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(input).sum()}

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", max_steps=1)
    trainer = Trainer(Loss(), args, train_dataset=data, callbacks=[StepPoints()])  # type: ignore[arg-type]
    failpoints.arm({failpoints.VARIABLE: f"{point}=raise:RuntimeError"})
    try:
        with pytest.raises(RuntimeError, match=failpoints.VARIABLE):
            trainer.train()
    finally:
        failpoints.arm({})
    assert (layer.weight.item() == before) == (point == "step.before_opt")
    assert trainer.state.global_step == 0
