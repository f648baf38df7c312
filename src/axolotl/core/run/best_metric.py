"""`metric_for_best_model` against what an evaluation measures.

Reward functions log metrics under names of their own, so that only an evaluation can tell which ones there are.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from axolotl.errors import ConfigError

_PREFIX = "eval_"


class RequireBestMetric(TrainerCallback):
    """Ends the run where transformers would look for the metric in vain."""

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Raises `ConfigError` that lists the metrics of this evaluation."""
        wanted = args.metric_for_best_model
        if wanted is None:
            return
        measured = {name: value for name, value in (metrics or {}).items() if value is not None}
        if _PREFIX + wanted.removeprefix(_PREFIX) in measured:
            return
        names = sorted(name for name in measured if name.startswith(_PREFIX))
        raise ConfigError(
            f"metric_for_best_model: {wanted} is not measured by the evaluation after step {state.global_step}",
            code="E-CFG-15",
            why=f"it measures {', '.join(names)}",
            do="set metric_for_best_model to one of these, then rerun train with --resume",
        )
