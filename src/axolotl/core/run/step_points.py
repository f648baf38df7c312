"""The failpoints around an optimizer's step, where transformers tells of it."""

from __future__ import annotations

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from axolotl.failpoints import point


class StepPoints(TrainerCallback):
    """Before it the step's gradients are complete and clipped; after it the weights are new, and not counted yet."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        point("step.before_opt")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        point("step.after_opt")
