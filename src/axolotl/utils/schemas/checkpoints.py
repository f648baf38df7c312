"""Top-level options about checkpoints and evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from axolotl.utils.schemas.base import Options, option
from axolotl.utils.schemas.scalars import AsWord, Bool, Int, Number, Text


class CheckpointOptions(Options):
    output_dir: Text = option("./model-out", "Directory for everything the run writes.", min_length=1)
    save_strategy: Annotated[Literal["steps", "epoch", "no", "best"], AsWord] | None = option(
        None, "When checkpoints are written; `steps` when a number of steps is given, otherwise `epoch`."
    )
    save_steps: Number | None = option(None, "Optimizer steps between checkpoints; below 1, a share of the run.", gt=0)
    saves_per_epoch: Int | None = option(None, "Checkpoints in each epoch; 0 leaves it to `save_steps`.", ge=0)
    save_total_limit: Int | None = option(None, "How many checkpoints are kept; all when unset.", ge=1)
    save_only_model: Bool = option(False, "Leave out the optimizer's state; such a run cannot be resumed.")
    resume_from_checkpoint: Text | None = option(None, "Checkpoint to go on from, as `--resume=PATH` does.")
    auto_resume_from_checkpoints: Bool = option(
        False, "Go on from the newest checkpoint in `output_dir`, as `--resume` does."
    )
    load_best_model_at_end: Bool = option(False, "Finish with the best checkpoint instead of the last.")
    metric_for_best_model: Text | None = option(None, "Metric that says which checkpoint is best.")
    greater_is_better: Bool | None = option(None, "Whether more of that metric is better.")
    eval_strategy: Annotated[Literal["steps", "epoch", "no"], AsWord] | None = option(
        None, "When evaluation runs; `steps` when a number of steps is given, otherwise `epoch`."
    )
    eval_steps: Number | None = option(None, "Optimizer steps between evaluations; below 1, a share of the run.", gt=0)
    evals_per_epoch: Int | None = option(None, "Evaluations in each epoch; 0 leaves it to `eval_steps`.", ge=0)
    early_stopping_patience: Int | None = option(None, "Stop after so many evaluations without improvement.", ge=1)
    hub_model_id: Text | None = option(None, "Repository of the hub that checkpoints are uploaded to.")
