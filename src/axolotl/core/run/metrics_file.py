"""`metrics.jsonl`: one JSON object a log line, under TRL's names, whatever else metrics are reported to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

# transformers would keep every line in memory, and write all of them into every checkpoint: half a megabyte more of
# either after each hundred steps.
KEPT_LINES = 100


class MetricsFile(TrainerCallback):
    """Appends to the file. A value that is not finite is written as null: the file stays JSON.

    Of what is in the file the trainer's state keeps the last `KEPT_LINES` only.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """A resumed run takes back the lines of steps that its checkpoint does not hold."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text().splitlines() if _step_of(line) <= state.global_step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(self._path)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        del state.log_history[:-KEPT_LINES]
        if not state.is_world_process_zero:
            return
        entry = {"step": state.global_step, **{name: _finite(value) for name, value in (logs or {}).items()}}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that a killed run left half written."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
