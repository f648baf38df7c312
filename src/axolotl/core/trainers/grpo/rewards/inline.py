"""Runs the reward functions in the trainer's own main thread."""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn

import torch

from axolotl.core.trainers.grpo.rewards.function import RESERVED, RewardFunction
from axolotl.core.trainers.grpo.rewards.validation import checked_values
from axolotl.core.trainers.grpo.types import RewardRequest, RewardResult
from axolotl.errors import RewardError
from axolotl.utils.user_code import error_lines, error_place, one_line


class InlineRewards:
    """A `RewardRunner` without workers: functions run one after the other; what async ones return is awaited together.

    A function that hangs hangs the run, and one that crashes Python ends it.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = tuple(functions)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self._functions)

    def score(self, request: RewardRequest) -> RewardResult:
        """Main thread. `RewardError` names the function, the exception and the user's line."""
        extra: dict[str, list[Any]] = defaultdict(list)
        metrics: dict[str, list[float]] = defaultdict(list)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            extra[column].extend(values)

        def log_metric(name: str, value: float) -> None:
            metrics[name].append(float(value))

        returned = []
        for function in self._functions:
            arguments = {
                **{name: list(values) for name, values in request.columns.items()},
                "prompts": list(request.prompts),
                "completions": list(request.completions),
                "completion_ids": list(request.completion_ids),
                "trainer_state": request.trainer_state,
                "log_extra": log_extra,
                "log_metric": log_metric,
            }
            returned.append(_call(function, arguments))
        returned = _awaited(self._functions, returned, tuple(request.columns))
        count = len(request.completions)
        columns = [checked_values(f, values, count) for f, values in zip(self._functions, returned, strict=True)]
        values = torch.tensor(columns, dtype=torch.float32).reshape(len(columns), count).T.contiguous()
        return RewardResult(values=values, extra=dict(extra), metrics=dict(metrics))

    def close(self) -> None:
        """Nothing to end: no worker was started."""


def _call(function: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        return function.function(**function.accepted(arguments))
    except (Exception, SystemExit) as error:
        _raise_as_ours(function, error, tuple(name for name in arguments if name not in RESERVED))


def _awaited(functions: Sequence[RewardFunction], returned: list[Any], columns: tuple[str, ...]) -> list[Any]:
    """`returned` with the awaitables of async functions replaced by their results."""
    waiting = [index for index, value in enumerate(returned) if inspect.isawaitable(value)]
    if not waiting:
        return returned

    async def settled(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except (Exception, SystemExit) as error:
            return error

    async def gather() -> list[Any]:
        return await asyncio.gather(*(settled(returned[index]) for index in waiting))

    results = asyncio.run(gather())
    final = list(returned)
    for index, result in zip(waiting, results, strict=True):
        if isinstance(result, BaseException):
            _raise_as_ours(functions[index], result, columns)
        final[index] = result
    return final


def _raise_as_ours(function: RewardFunction, error: BaseException, columns: tuple[str, ...]) -> NoReturn:
    place = error_place(error)
    looks_missing = isinstance(error, (KeyError, NameError, TypeError))
    raise RewardError(
        f"{function.path} raised {one_line(error)} ({place or function.place})",
        code="E-RWD-02",
        why=f"columns passed: {', '.join(columns) or 'none'}",
        do="correct the reward function"
        + ("; does remove_columns of the dataset transform drop a column it needs?" if looks_missing else ""),
        details=error_lines(error),
    ) from error
