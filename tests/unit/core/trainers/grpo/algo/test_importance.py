"""Importance weights against numbers worked by hand."""

import math

import pytest
import torch

from axolotl.core.trainers.grpo.algo.importance import ImportanceMode, ImportanceSpec, importance_weights

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


def test_a_masked_weight_is_exactly_zero() -> None:
    result = importance_weights(POLICY, SAMPLING, MASK, ImportanceSpec("token_mask", 3.0))
    assert result.weights[0, 0].item() == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_sampling_logp_is_dropped(value: float) -> None:
    sampling = SAMPLING.clone()
    sampling[0, 0] = value
    result = importance_weights(POLICY, sampling, MASK, ImportanceSpec("sequence_truncate", 3.0))
    assert result.known.tolist() == [[0, 1, 1], [1, 1, 0]]
    # Without the first token, whose ratio is 4, the first completion has 1/2 * 1.
    assert result.weights.tolist() == [[0.5], [3.0]]


def test_weights_carry_no_gradient() -> None:
    policy = POLICY.clone().requires_grad_()
    result = importance_weights(policy, SAMPLING, MASK, ImportanceSpec("token_truncate"))
    assert not result.weights.requires_grad
