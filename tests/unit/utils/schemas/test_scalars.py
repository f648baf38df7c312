"""Values that come from Python instead of YAML pass the same checks."""

import math

import pytest

from axolotl.utils.schemas.scalars import Plain, read_bool, read_float, read_int, read_number, read_text, show


@pytest.mark.parametrize("value", [True, "1", None, [1], math.nan, math.inf, Plain("1_"), Plain("")])
def test_what_is_no_number(value):
    with pytest.raises(ValueError, match="needs a number"):
        read_float(value)


@pytest.mark.parametrize("value", [True, 1.5, "1", Plain("1.5"), Plain("007")])
def test_what_is_no_whole_number(value):
    with pytest.raises(ValueError, match="needs a whole number"):
        read_int(value)


@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_what_is_no_truth_value(value):
    with pytest.raises(ValueError, match="needs true or false"):
        read_bool(value)


@pytest.mark.parametrize("value", [1, 1.5, True, None, {"a": 1}])
def test_what_is_no_text(value):
    with pytest.raises(ValueError, match="needs text"):
        read_text(value)


def test_a_count_stays_a_count_and_a_share_a_share():
    assert isinstance(read_number(Plain("5")), int)
    assert isinstance(read_number(5.0), int)
    assert read_number(Plain("0.5")) == 0.5


def test_values_are_shown_as_they_are_written():
    assert show({"a": [True, None, "x", Plain("y"), 1.5]}) == '{a: [true, null, "x", y, 1.5]}'
    assert len(show("x" * 500)) == 60
