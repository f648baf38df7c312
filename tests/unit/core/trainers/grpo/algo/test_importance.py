"""Importance weights against numbers worked by hand."""

import math

import pytest
import torch

from axolotl.core.trainers.grpo.algo.importance import (
    ImportanceMode,
    ImportanceSpec,
    WeightSample,
    importance_weights,
    without_rejected,
)

LN2 = math.log(2.0)
# Ratios 4, 1/2, 1 in the first completion; 2, 2 and padding in the second.
POLICY = torch.tensor([[2 * LN2, -LN2, 0.0], [LN2, LN2, 0.0]])
SAMPLING = torch.zeros(2, 3)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("mode", "cap", "floor", "expected"),
    [
        ("token_truncate", 3.0, None, [[3, 0.5, 1], [2, 2, 1]]),
        ("token_truncate", 3.0, 0.8, [[3, 0.8, 1], [2, 2, 1]]),
        ("token_mask", 3.0, None, [[0, 0.5, 1], [2, 2, 1]]),
        ("token_mask", 3.0, 0.8, [[0, 0, 1], [2, 2, 1]]),
        ("token_mask", None, 0.8, [[4, 0, 1], [2, 2, 1]]),
        ("sequence_truncate", 3.0, None, [[2], [3]]),
        ("sequence_mask", 3.0, None, [[2], [0]]),
        ("sequence_mask", 5.0, 2.5, [[0], [4]]),
    ],
)
def test_modes(mode: ImportanceMode, cap: float | None, floor: float | None, expected: list[list[float]]) -> None:
    result = importance_weights(POLICY, SAMPLING, MASK, ImportanceSpec(mode, cap, floor))
    assert result.weights.tolist() == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize(
    ("mode", "changed", "rejected"),
    [
        ("token_truncate", [[1, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]),
        ("token_mask", [[1, 1, 0], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]]),
        ("sequence_truncate", [[0], [1]], [[0], [0]]),
        ("sequence_mask", [[0], [1]], [[0], [1]]),
    ],
)
def test_what_the_bounds_changed(mode: ImportanceMode, changed: list[list[int]], rejected: list[list[int]]) -> None:
    result = importance_weights(POLICY, SAMPLING, MASK, ImportanceSpec(mode, 3.0, 0.8))
    assert result.is_changed.long().tolist() == changed
    assert result.is_rejected.long().tolist() == rejected
    # Exactly 0, not nearly.
    assert result.weights[result.is_rejected].tolist() == [0.0] * sum(map(sum, rejected))


def test_without_bounds_the_weights_are_the_ratios() -> None:
    result = importance_weights(POLICY, SAMPLING, MASK, ImportanceSpec("token_truncate", None, None))
    assert result.weights.tolist() == [pytest.approx([4, 0.5, 1]), pytest.approx([2, 2, 1])]
    assert not result.is_changed.any()


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_bounds_that_exclude_one_leave_padding_alone(mode: ImportanceMode) -> None:
    """A loss that multiplies the weights of a whole row would otherwise depend on how wide the batch is."""
    result = importance_weights(POLICY, SAMPLING, MASK, ImportanceSpec(mode, 0.9, None))
    assert result.weights[1, 2].item() == 1.0
    assert not result.is_changed[1, 2] and not result.is_rejected[1, 2]
    assert result.is_changed.long().tolist() == [[1, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # The first token, whose ratio is 4, is unknown: the first completion has 1/2 * 1.
        ("token_truncate", [[1, 0.8, 1], [2, 2, 1]]),
        ("token_mask", [[1, 0, 1], [2, 2, 1]]),
        ("sequence_truncate", [[0.8], [3.0]]),
        ("sequence_mask", [[0], [0]]),
    ],
)
def test_a_token_without_a_finite_sampling_logp_is_dropped(
    mode: ImportanceMode, expected: list[list[float]], value: float
) -> None:
    sampling = SAMPLING.clone()
    sampling[0, 0] = value
    result = importance_weights(POLICY, sampling, MASK, ImportanceSpec(mode, 3.0, 0.8))
    assert result.known.tolist() == [[0, 1, 1], [1, 1, 0]]
    assert result.weights.tolist() == [pytest.approx(row) for row in expected]
    assert result.gaps[0, 0].item() == 0.0


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_completion_of_which_nothing_is_known_counts_nowhere(mode: ImportanceMode) -> None:
    sampling = SAMPLING.clone()
    sampling[0] = math.nan
    result = importance_weights(POLICY, sampling, MASK, ImportanceSpec(mode, 0.9, None))
    assert result.weights[0].unique().tolist() == [1.0]
    assert result.is_left_out.tolist()[0]
    sample = result.counted()
    assert sample.gaps.tolist() == pytest.approx([LN2, LN2])
    assert sample.weights.numel() == (2 if mode.startswith("token") else 1)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ImportanceSpec("token_truncate", 1.5), [False, False]),
        (ImportanceSpec("token_mask", 1.5), [False, True]),
        (ImportanceSpec("token_mask", 5.0), [False, False]),
        (ImportanceSpec("sequence_mask", 3.0), [False, True]),
    ],
)
def test_a_completion_without_a_token_left(spec: ImportanceSpec, expected: list[bool]) -> None:
    assert importance_weights(POLICY, SAMPLING, MASK, spec).is_left_out.tolist() == expected


def test_only_what_counts_is_measured() -> None:
    result = importance_weights(POLICY, SAMPLING, MASK, ImportanceSpec("token_truncate", 3.0, 0.8))
    sample = WeightSample.joined([result.counted(), result.counted()])
    assert sample.weights.tolist() == pytest.approx([3, 0.8, 1, 2, 2] * 2)
    assert sample.log_ratios.tolist() == pytest.approx([2 * LN2, -LN2, 0, LN2, LN2] * 2)
    assert sample.is_changed.tolist() == [True, True, False, False, False] * 2
    assert sample.gaps.tolist() == pytest.approx([2 * LN2, LN2, 0, LN2, LN2] * 2)


def test_what_is_measured_of_sequences_is_one_weight_each() -> None:
    sample = importance_weights(POLICY, SAMPLING, MASK, ImportanceSpec("sequence_truncate", 3.0)).counted()
    assert sample.weights.tolist() == pytest.approx([2, 3])
    assert sample.log_ratios.tolist() == pytest.approx([LN2, 2 * LN2])
    assert sample.gaps.numel() == 5


@pytest.mark.parametrize(
    ("mode", "is_product", "expected"),
    [
        ("token_mask", False, [[0, 1, 1], [1, 1, 1]]),
        ("token_mask", True, [[0, 0, 0], [1, 1, 1]]),
        ("sequence_mask", False, [[1, 1, 1], [0, 0, 0]]),
        ("token_truncate", False, [[1, 1, 1], [1, 1, 1]]),
        ("sequence_truncate", False, [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_what_is_rejected_has_no_gradient(mode: ImportanceMode, is_product: bool, expected: list[list[float]]) -> None:
    logps = POLICY.clone().requires_grad_()
    result = importance_weights(logps, SAMPLING, MASK, ImportanceSpec(mode, 3.0))
    rest = without_rejected(logps, result, is_product=is_product)
    assert rest.tolist() == logps.tolist()
    rest.sum().backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == expected


def test_weights_carry_no_gradient() -> None:
    policy = POLICY.clone().requires_grad_()
    result = importance_weights(policy, SAMPLING, MASK, ImportanceSpec("token_truncate"))
    assert not result.weights.requires_grad
