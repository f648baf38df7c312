from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from axolotl.core.trainers.grpo.rewards.function import RewardFunction
from axolotl.core.trainers.grpo.rewards.validation import checked_values
from axolotl.errors import RewardError


def scorer() -> None: ...


FUNCTION = RewardFunction("rewards.scorer", "scorer", scorer, "rewards.py")
PLACE = f"test_validation.py:{scorer.__code__.co_firstlineno}"


@pytest.mark.parametrize(
    "returned",
    [
        [0.5, 1, True],
        (0.5, 1, True),
        [np.float32(0.5), np.int64(1), np.bool_(True)],
        [torch.tensor(0.5), torch.tensor(1), torch.tensor(True)],
        [np.array(0.5), 1.0, 1.0],
        np.array([0.5, 1.0, 1.0]),
        torch.tensor([0.5, 1.0, 1.0], dtype=torch.bfloat16),
    ],
)
def test_every_kind_of_number_is_taken(returned: Any) -> None:
    assert checked_values(FUNCTION, returned, 3) == [0.5, 1.0, 1.0]


def test_none_abstains() -> None:
    first, second = checked_values(FUNCTION, [None, 2.0], 2)
    assert math.isnan(first) and second == 2.0


@pytest.mark.parametrize(
    ("returned", "code", "what"),
    [
        ([1.0], "E-RWD-01", "rewards.scorer returned 1 value for 2 completions"),
        ([1.0, 2.0, 3.0], "E-RWD-01", "rewards.scorer returned 3 values for 2 completions"),
        (np.ones(4), "E-RWD-01", "returned 4 values for 2 completions"),
        (["yes", 1.0], "E-RWD-05", "returned at index 0 str 'yes'; expected a number or None"),
        ([1.0, {"score": 1}], "E-RWD-05", "returned at index 1 dict {'score': 1}; expected a number or None"),
        ([[1.0], [2.0]], "E-RWD-05", "returned at index 0 list [1.0]"),
        ([1.0, 1j], "E-RWD-05", "returned at index 1 complex 1j"),
        (None, "E-RWD-05", "returned None; expected a list of 2 numbers"),
        (0.5, "E-RWD-05", "returned float 0.5; expected a list of 2 numbers"),
        ("ab", "E-RWD-05", "returned str 'ab'; expected a list of 2 numbers"),
        ({"a": 1, "b": 2}, "E-RWD-05", "returned dict {'a': 1, 'b': 2}; expected a list"),
        (torch.ones(2, 1), "E-RWD-05", "returned Tensor of shape (2, 1); expected a list"),
        ([1.0, float("nan")], "E-RWD-04", "returned nan at index 1"),
        ([float("-inf"), 1.0], "E-RWD-04", "returned -inf at index 0"),
        ([1e39, 1.0], "E-RWD-04", "returned 1e+39 at index 0"),
        ([1.0, 10**400], "E-RWD-04", "returned inf at index 1"),
    ],
)
def test_everything_else_is_a_named_error(returned: Any, code: str, what: str) -> None:
    with pytest.raises(RewardError) as caught:
        checked_values(FUNCTION, returned, 2)
    assert caught.value.code == code
    assert what in caught.value.what and f"({PLACE})" in caught.value.what
    assert caught.value.do
