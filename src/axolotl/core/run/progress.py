"""What a user sees while it trains: a bar on a terminal, plain lines through a pipe."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Progress(TrainerCallback):
    """One line a log entry: step, reward, loss, completion length, speed, time left. stream: stderr when None."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: tqdm[Any] | None = None
        self._began = 0.0
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step
        if self._stream.isatty() and state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", file=self._stream, dynamic_ncols=True
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero or not logs or not ({"loss", "eval_loss"} & logs.keys()):
            return
        done = state.global_step - self._first_step
        per_step = (time.monotonic() - self._began) / max(done, 1)
        line = format_line(logs, state.global_step, state.max_steps, per_step)
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def format_line(logs: dict[str, Any], step: int, max_steps: int, seconds_per_step: float) -> str:
    """`step 3/20  reward 0.21 (std 0.40)  loss 0.0123  ...`; what was not logged is left out."""
    if "eval_loss" in logs:
        return f"step {step}/{max_steps}  evaluation  reward {_number(logs.get('eval_reward'))}"
    parts = [f"step {step}/{max_steps}"]
    if logs.get("reward") is not None:
        parts.append(f"reward {_number(logs['reward'])} (std {_number(logs.get('reward_std'))})")
    parts.append(f"loss {_number(logs['loss'])}")
    if "completions/mean_length" in logs:
        parts.append(f"length {logs['completions/mean_length']:.1f}")
    if "generation/tokens_per_second" in logs:
        parts.append(f"{logs['generation/tokens_per_second']:.0f} tok/s")
    parts.append(f"{seconds_per_step:.1f} s/step")
    parts.append(f"{_clock(seconds_per_step * (max_steps - step))} left")
    return "  ".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
