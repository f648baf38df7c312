"""Notes in the output directory what transformers and TRL write there.

TRL's tables of completions, and micro-batches that were not finite, are noted at the next save and at the end: they
appear without a callback.
"""

from __future__ import annotations

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from axolotl.core.run.output_dir import OutputDir
from axolotl.core.trainers.grpo.nonfinite import DIRECTORY


class NoteWrittenFiles(TrainerCallback):
    """Checkpoints when they are saved, everything else when training ends. The store announces them before."""

    def __init__(self, output: OutputDir) -> None:
        self._output = output

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._output.note(self._output.path / f"checkpoint-{state.global_step}")
        self._note_tables()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._note_tables()
        runs = self._output.path / "runs"
        if runs.is_dir():
            self._output.note(*runs.rglob("events.out.tfevents.*"))

    def _note_tables(self) -> None:
        self._output.note(*(self._output.path / "completions").glob("completions_*.parquet"))
        self._output.note(*(self._output.path / DIRECTORY).glob("step-*"))
