"""The learning rate's schedule, tried out before the model is loaded: transformers builds it when training begins."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import TrainingArguments, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
from transformers.trainer_utils import SchedulerType

from axolotl.errors import ConfigError

# What transformers gives to every scheduler, or to none.
_GIVEN = frozenset({"self", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"})
# Built from whatever keywords come, by a class that has them.
_CLASSES: dict[SchedulerType, Callable[..., Any]] = {
    SchedulerType.REDUCE_ON_PLATEAU: ReduceLROnPlateau,
    SchedulerType.GREEDY: GreedyLR,
}

_METRIC = 1.0


def check_schedule(args: TrainingArguments, num_steps: int) -> None:
    """Build the schedule for an optimizer that is thrown away, and ask it for learning rates of the whole run.

    num_steps: optimizer steps of the run. Raises `ConfigError` naming `lr_scheduler` and what it refuses.
    """
    name = SchedulerType(args.lr_scheduler_type)
    settings: dict[str, Any] = dict(args.lr_scheduler_kwargs or {})  # type: ignore[arg-type]
    _check_names(name, settings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rates = _rates(name, args, num_steps, settings)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise _refused(name, settings, str(error) or type(error).__name__) from error
    wrong = [rate for rate in rates if isinstance(rate, complex) or not math.isfinite(rate) or rate < -1e-12]
    if wrong:
        raise _refused(name, settings, f"the learning rate would become {wrong[0]}")


def _rates(name: SchedulerType, args: TrainingArguments, num_steps: int, settings: dict[str, Any]) -> list[float]:
    # Two groups, as transformers makes: with weight decay and without.
    groups = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)]
    warmup = args.get_warmup_steps(num_steps)
    schedule = get_scheduler(
        name,
        torch.optim.SGD(groups, lr=args.learning_rate),
        num_warmup_steps=warmup,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=settings,
    )
    if isinstance(schedule, LambdaLR):
        steps = sorted({0, min(warmup, num_steps), (warmup + num_steps) // 2, num_steps - 1, num_steps})
        factors = [schedule.lr_lambdas[0](step) for step in steps]
        return [args.learning_rate * factor for factor in factors]
    schedule.step(_METRIC)
    return list(schedule.get_last_lr())


def _check_names(name: SchedulerType, settings: dict[str, Any]) -> None:
    maker: Callable[..., Any] = _CLASSES[name] if name in _CLASSES else cast(Any, TYPE_TO_SCHEDULER_FUNCTION[name])
    parameters = inspect.signature(maker).parameters
    taken = {key: parameter for key, parameter in parameters.items() if key not in _GIVEN and not key.startswith("_")}
    unknown = sorted(set(settings) - set(taken))
    if unknown:
        raise ConfigError(
            f"lr_scheduler_kwargs: lr_scheduler {name.value} takes no {unknown[0]}",
            code="E-CFG-12",
            why=f"it takes {', '.join(taken)}" if taken else "it takes nothing",
            do="remove or correct that name",
        )
    missing = [key for key, parameter in taken.items() if parameter.default is parameter.empty and key not in settings]
    if missing:
        raise ConfigError(
            f"lr_scheduler {name.value} needs {missing[0]}",
            code="E-CFG-12",
            do=f"set it: lr_scheduler_kwargs: {{{missing[0]}: ...}}",
        )


def _refused(name: SchedulerType, settings: dict[str, Any], why: str) -> ConfigError:
    return ConfigError(
        f"lr_scheduler {name.value} cannot be used with lr_scheduler_kwargs: {settings}",
        code="E-CFG-12",
        why=" ".join(why.split()),
        do="change lr_scheduler_kwargs or lr_scheduler",
    )
