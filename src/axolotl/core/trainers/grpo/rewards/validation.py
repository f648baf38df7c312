"""What a reward function returned, checked and made plain floats. None becomes NaN: the function abstained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from axolotl.core.trainers.grpo.rewards.function import RewardFunction
from axolotl.errors import RewardError

_LARGEST = float(np.finfo(np.float32).max)


def checked_values(function: RewardFunction, returned: Any, expected: int) -> list[float]:
    """`expected` floats, NaN where `returned` holds None.

    Raises `RewardError`: E-RWD-01 for another number of values, E-RWD-05 for a type that is no number,
    E-RWD-04 for NaN and infinity.
    """
    values = _as_list(function, returned, expected)
    if len(values) != expected:
        raise RewardError(
            f"{function.path} returned {_count(len(values))} for {expected} completions ({function.place})",
            code="E-RWD-01",
            do="return one number or None for every completion, in order",
        )
    return [_as_float(function, index, value) for index, value in enumerate(values)]


def _as_list(function: RewardFunction, returned: Any, expected: int) -> Sequence[Any]:
    if isinstance(returned, (np.ndarray, torch.Tensor)) and returned.ndim == 1:
        return list(returned.tolist())
    if isinstance(returned, (list, tuple)):
        return returned
    raise RewardError(
        f"{function.path} returned {_describe(returned)}; expected a list of {expected} numbers ({function.place})",
        code="E-RWD-05",
        why="the function has no return statement on this path" if returned is None else "",
        do="return a list with one number or None for every completion",
    )


def _as_float(function: RewardFunction, index: int, value: Any) -> float:
    if value is None:
        return math.nan
    number = _plain(value)
    if number is None:
        raise RewardError(
            f"{function.path} returned at index {index} {_describe(value)}; expected a number or None "
            f"({function.place})",
            code="E-RWD-05",
            do="return one number or None for every completion",
        )
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise RewardError(
            f"{function.path} returned {number} at index {index} ({function.place})",
            code="E-RWD-04",
            why="NaN and infinity would reach every advantage of the group",
            do="return None to leave a completion out of this reward, or a finite number",
        )
    return number


def _plain(value: Any) -> float | None:
    if isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _count(number: int) -> str:
    return "1 value" if number == 1 else f"{number} values"
