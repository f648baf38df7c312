"""What the config says now, where transformers would go on with what a checkpoint remembers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class FollowConfig(TrainerCallback):
    """Intervals and learning rate of a resumed run are those of its config; nothing changes where they are equal.

    is_best_forgotten: the best value so far is one of another metric.
    """

    def __init__(self, *, is_best_forgotten: bool = False) -> None:
        self._is_best_forgotten = is_best_forgotten

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The state comes from the checkpoint, with the intervals of the run that wrote it.
        state.compute_steps(args, state.max_steps)  # type: ignore[no-untyped-call]
        if self._is_best_forgotten:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        optimizer, scheduler = kwargs.get("optimizer"), kwargs.get("lr_scheduler")
        if optimizer is None or scheduler is None:
            return
        first = optimizer.param_groups[0].get("initial_lr")
        if not first or first == args.learning_rate:
            return
        factor = args.learning_rate / first
        for group in optimizer.param_groups:
            group["initial_lr"] *= factor
            group["lr"] *= factor
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
        # What is logged for the next step.
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
