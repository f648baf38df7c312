"""Top-level options about logging."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from axolotl.utils.schemas.base import Options, option
from axolotl.utils.schemas.scalars import AsWord, Bool, Number, Text, read_text_or_list

Reporter = Literal["wandb", "tensorboard", "trackio", "none"]


def _read_reporters(value: object) -> list[str]:
    names = read_text_or_list(value)
    return [names] if isinstance(names, str) else names


class LoggingOptions(Options):
    logging_steps: Number = option(1, "Optimizer steps between lines of metrics; below 1, a share of the run.", gt=0)
    report_to: Annotated[list[Reporter], BeforeValidator(_read_reporters)] | None = option(
        None, "Where metrics go besides `metrics.jsonl`: `wandb`, `tensorboard`, `trackio`, or `none`."
    )
    use_wandb: Bool | None = option(None, "Log to Weights & Biases; true when `wandb_project` is set.")
    wandb_project: Text | None = option(None, "Project on Weights & Biases.")
    wandb_entity: Text | None = option(None, "User or team on Weights & Biases.")
    wandb_name: Text | None = option(None, "Name of the run on Weights & Biases.")
    wandb_run_id: Text | None = option(None, "Id of the run on Weights & Biases, to go on with it.")
    wandb_mode: Annotated[Literal["online", "offline", "disabled"], AsWord] | None = option(
        None, "How Weights & Biases connects."
    )
    wandb_watch: Annotated[Literal["gradients", "parameters", "all", "false"], AsWord] | None = option(
        None, "What Weights & Biases records of the weights."
    )
    wandb_log_model: Annotated[Literal["checkpoint", "end", "false"], AsWord] | None = option(
        None, "Which checkpoints Weights & Biases stores."
    )
    use_tensorboard: Bool = option(False, "Log to TensorBoard, in `output_dir`.")
    use_trackio: Bool | None = option(None, "Log to Trackio; true when `trackio_project_name` is set.")
    trackio_project_name: Text | None = option(None, "Project in Trackio.")
    trackio_run_name: Text | None = option(None, "Name of the run in Trackio.")
    trackio_space_id: Text | None = option(None, "Space of the hub that shows the Trackio board.")
