import math

import pytest
import torch

from axolotl.core.trainers.grpo.weight_sync.agreement import distance, has_moved, objection, stands_still, tolerance


def logps(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


POLICY, BASE = logps(-1.0, -2.0), logps(-1.2, -2.2)


@pytest.mark.parametrize(
    ("served", "found"),
    [
        (logps(-1.0, -2.0), None),
        (logps(-1.05, -2.05), None),
        (logps(-1.5, -1.5), "0.5 nats from the policy that was pushed, 0.3 from base"),
        (logps(-0.8, -1.8), "0.2 nats from the policy that was pushed, tolerance is 0.1"),
        (logps(-1.0, math.nan), "nan nats from the policy that was pushed, tolerance is 0.1"),
    ],
)
def test_a_distance_beyond_the_tolerance_is_an_objection(served: torch.Tensor, found: str | None) -> None:
    others = {"base": logps(-1.5, -2.1)} if found and "base" in found else {}
    assert objection(served, POLICY, others, tolerance=0.1, noise=1e-6) == found


def test_within_the_tolerance_it_must_be_nearer_to_the_policy_than_to_any_other() -> None:
    near_base = logps(-1.15, -2.15)
    found = objection(near_base, POLICY, {"the base model": BASE}, tolerance=1.0, noise=1e-3)
    assert found == "0.15 nats from the policy that was pushed, 0.05 from the base model"
    near_policy = logps(-1.05, -2.05)
    assert objection(near_policy, POLICY, {"the base model": BASE}, tolerance=1.0, noise=1e-3) is None


def test_a_policy_that_the_noise_could_hide_proves_nothing() -> None:
    assert objection(BASE, POLICY, {"the base model": BASE}, tolerance=1.0, noise=0.03) is None
    assert objection(BASE, POLICY, {"the base model": BASE}, tolerance=1.0, noise=0.01) is not None


def test_the_distance_is_a_mean_over_tokens() -> None:
    assert distance(logps(-1, -2), logps(-2, -5)) == 2.0


def test_half_precision_and_quantised_weights_are_given_more() -> None:
    assert tolerance(is_half=False, is_quantised=False) == 1e-3
    assert tolerance(is_half=True, is_quantised=False) == 0.1
    assert tolerance(is_half=True, is_quantised=True) == 0.5


@pytest.mark.parametrize(
    ("served_change", "change", "is_caught"),
    [
        (0.0, 0.05, True),
        (0.004, 0.05, True),
        (0.006, 0.05, False),
        (0.05, 0.05, False),
        (0.0, 0.009, False),
        (0.0, 0.0, False),
    ],
)
def test_a_server_must_move_when_the_policy_moved_by_more_than_the_noise(
    served_change: float, change: float, is_caught: bool
) -> None:
    noise = 0.01
    found = stands_still(BASE + 0.02 + served_change, BASE + 0.02, POLICY + change, POLICY, noise=noise)
    expected = f"the trainer's log-probs moved by {change:.3g} nats, the server's by {served_change:.3g}"
    assert found == (expected if is_caught else None)
    assert has_moved(POLICY + change, POLICY, noise=noise) == (change > noise)
