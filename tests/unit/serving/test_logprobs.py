"""Undoing truncation, with numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from axolotl.serving.logprobs import policy_logprobs
from axolotl.serving.wire import Completion


def completion(logprobs: list[float | None], log_kept: list[float] | None) -> Completion:
    ids = list(range(len(logprobs)))
    return Completion(ids=ids, logprobs=logprobs, log_kept=log_kept, finish_reason="length")


def test_the_kept_mass_is_multiplied_back() -> None:
    """A token of probability 0.3 in a distribution cut to 0.6 of its mass was drawn with 0.5."""
    values = policy_logprobs(completion([math.log(0.5), math.log(0.25)], [math.log(0.6), 0.0]))
    assert values == pytest.approx((math.log(0.3), math.log(0.25)))


def test_without_a_mass_the_values_stay() -> None:
    assert policy_logprobs(completion([-1.5, -2.0], None)) == (-1.5, -2.0)


@pytest.mark.parametrize("log_kept", [None, [-0.5, -0.5]])
def test_null_is_nan(log_kept: list[float] | None) -> None:
    first, second = policy_logprobs(completion([None, -1.0], log_kept))
    assert math.isnan(first) and not math.isnan(second)
