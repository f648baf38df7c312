"""When the optimizer steps, evaluates and saves."""

from __future__ import annotations

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.nodes import Path, Problem

_WITHOUT_ARGUMENTS = frozenset(
    {"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor"}
)


def optimizer_reads_its_arguments(config: AxolotlConfig) -> list[Problem]:
    """PyTorch's AdamW and Adafactor are set by options of their own; transformers reads no further ones for them."""
    if not config.optim_args or config.optimizer not in _WITHOUT_ARGUMENTS:
        return []
    message = f"is not read by optimizer {config.optimizer}; use adam_beta1, adam_beta2, adam_epsilon and weight_decay"
    return [Problem(("optim_args",), message)]


def one_schedule(config: AxolotlConfig) -> list[Problem]:
    """Intervals and warmups can be given in two ways each; 0 times an epoch means the other way."""
    problems = []
    for times, steps in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
        if getattr(config, times) and getattr(config, steps) is not None:
            problems.append(Problem((times,), f"cannot be combined with {steps}; keep one of them"))
    if config.warmup_steps is not None and config.warmup_ratio is not None:
        problems.append(Problem(("warmup_ratio",), "cannot be combined with warmup_steps; keep one of them"))
    return problems


def evaluation_drives_what_needs_it(config: AxolotlConfig) -> list[Problem]:
    """The best checkpoint, and a learning rate that follows a metric, need an evaluation."""
    needs: list[Path] = []
    if config.load_best_model_at_end:
        needs.append(("load_best_model_at_end",))
    if config.save_strategy == "best":
        needs.append(("save_strategy",))
    if config.lr_scheduler in ("reduce_lr_on_plateau", "greedy"):
        needs.append(("lr_scheduler",))
    if not config.val_set_size or config.eval_strategy == "no":
        return [Problem(path, "needs an evaluation; set val_set_size, and no eval_strategy: no") for path in needs]
    if config.save_strategy == "best" and config.metric_for_best_model is None:
        return [Problem(("save_strategy",), "is best; set metric_for_best_model, such as eval_reward")]
    return []


def best_model_is_saved(config: AxolotlConfig) -> list[Problem]:
    """The best checkpoint can only be loaded where every saving comes with an evaluation."""
    if not config.load_best_model_at_end or not config.val_set_size or config.save_strategy == "best":
        return []
    saves = _rhythm(config.save_strategy, config.save_steps, config.saves_per_epoch)
    evals = _rhythm(config.eval_strategy, config.eval_steps, config.evals_per_epoch)
    path: Path = ("load_best_model_at_end",)
    if saves[0] != evals[0]:
        return [Problem(path, f"needs saving and evaluation in the same rhythm, not {saves[0]} and {evals[0]}")]
    if saves[0] == "steps" and not round(saves[1] / evals[1], 6).is_integer():
        return [Problem(path, f"needs save_steps {saves[1]:g} to be a multiple of eval_steps {evals[1]:g}")]
    if saves[0] == "times per epoch" and saves[1] != evals[1]:
        return [Problem(path, f"needs saves_per_epoch {saves[1]:g} and evals_per_epoch {evals[1]:g} to be equal")]
    return []


def _rhythm(strategy: str | None, steps: float | None, times_per_epoch: int | None) -> tuple[str, float]:
    """How saving or evaluation is paced, and its number."""
    if steps is not None:
        return strategy or "steps", steps
    if times_per_epoch:
        return "times per epoch", times_per_epoch
    return strategy or "epoch", 1
