"""Runs the reward functions in the trainer's own main thread."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from axolotl.core.trainers.grpo.rewards.function import RESERVED, RewardFunction
from axolotl.core.trainers.grpo.rewards.validation import checked_values
from axolotl.core.trainers.grpo.types import RewardRequest, RewardResult
from axolotl.errors import RewardError
from axolotl.failpoints import point
from axolotl.utils.user_code import error_lines, error_place, one_line, pass_interruption


class InlineRewards:
    """A `RewardRunner` without workers: functions run one after the other; what async ones return is awaited together.

    Async functions always run in the same event loop, so that what one opens (a client, a lock) serves later calls.
    A function that hangs hangs the run, and one that crashes Python ends it.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = tuple(functions)
        self._runner: asyncio.Runner | None = None
        self._has_warned = False

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

        point("rwd.sent")
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
        returned = self._awaited(returned, tuple(request.columns))
        point("rwd.received")
        count = len(request.completions)
        _check_extra(extra, count)
        columns = [checked_values(f, values, count) for f, values in zip(self._functions, returned, strict=True)]
        values = torch.tensor(columns, dtype=torch.float32).reshape(len(columns), count).T.contiguous()
        self._warn_of_silence(values)
        return RewardResult(values=values, extra=dict(extra), metrics=dict(metrics))

    def close(self) -> None:
        """Ends the event loop, where one was needed."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _warn_of_silence(self, values: torch.Tensor) -> None:
        """Once: completions without any reward teach nothing, and the run would look healthy."""
        if self._has_warned or not bool(values.isnan().all()):
            return
        self._has_warned = True
        print(
            f"warning: {', '.join(function.path for function in self._functions)} returned None for all "
            f"{values.shape[0]} completions of a batch: nothing is learned from it",
            file=sys.stderr,
            flush=True,
        )

    def _awaited(self, returned: list[Any], columns: tuple[str, ...]) -> list[Any]:
        """`returned` with the awaitables of async functions replaced by their results."""
        waiting = [index for index, value in enumerate(returned) if inspect.isawaitable(value)]
        if not waiting:
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
        results = self._runner.run(_gather([returned[index] for index in waiting]))
        final = list(returned)
        for index, result in zip(waiting, results, strict=True):
            if isinstance(result, BaseException):
                _raise_as_ours(self._functions[index], result, columns)
            final[index] = result
        return final


def _call(function: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        return function.function(**function.accepted(arguments))
    except (Exception, SystemExit) as error:
        _raise_as_ours(function, error, tuple(name for name in arguments if name not in RESERVED))


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """The result of each, or the exception that it raised."""

    async def settled(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except (Exception, SystemExit) as error:
            pass_interruption(error)
            return error

    return await asyncio.gather(*(settled(awaitable) for awaitable in awaitables))


def _check_extra(extra: Mapping[str, Sequence[Any]], count: int) -> None:
    """The table of completions has one row for each: a shorter or longer column would shift the values."""
    for column, values in extra.items():
        if len(values) != count:
            raise RewardError(
                f"log_extra: column {column!r} has {len(values)} values for {count} completions",
                code="E-RWD-01",
                do="give log_extra one value for every completion, in order, and each function columns of its own",
            )


def _raise_as_ours(function: RewardFunction, error: BaseException, columns: tuple[str, ...]) -> NoReturn:
    pass_interruption(error)
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
