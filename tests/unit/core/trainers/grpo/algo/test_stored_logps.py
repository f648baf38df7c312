"""What `replay_recompute_logps: false` changes, in numbers worked by hand.

One token. The sampler gave it 0.5, the policy of the step it was first scored in 0.6, the present policy 0.9.
"""

import math

import pytest
import torch

from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec, importance_weights
from axolotl.core.trainers.grpo.algo.stored_logps import stored_policy_logps

NAN = math.nan
SAMPLER, FIRST, PRESENT = math.log(0.5), math.log(0.6), math.log(0.9)


def weight_ratio_and_gradient(stored: float, advantage: float, cap: float = 3.0) -> tuple[float, float, float]:
    """The importance weight, the policy ratio, and the gradient of PPO's objective (epsilon 0.2) by the log-prob."""
    logps = torch.tensor([[PRESENT]], requires_grad=True)
    old = stored_policy_logps(logps, torch.tensor([[stored]]))
    weight = importance_weights(
        old, torch.tensor([[SAMPLER]]), torch.ones(1, 1), ImportanceSpec("token_truncate", cap=cap)
    ).weights
    ratio = (logps - old).exp()
    objective = weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    (gradient,) = torch.autograd.grad(objective.sum(), logps)
    return weight.item(), ratio.item(), gradient.item()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_scored_again_the_whole_distance_is_in_the_importance_weight(advantage: float) -> None:
    weight, ratio, gradient = weight_ratio_and_gradient(NAN, advantage)
    assert weight == pytest.approx(0.9 / 0.5)
    assert ratio == pytest.approx(1.0)
    assert gradient == pytest.approx(1.8 * advantage)


def test_stored_the_distance_is_split_and_epsilon_stops_what_has_gone_far_enough() -> None:
    weight, ratio, gradient = weight_ratio_and_gradient(FIRST, 1.0)
    assert weight == pytest.approx(0.6 / 0.5)
    assert ratio == pytest.approx(0.9 / 0.6)
    # 1.5 is above 1 + 0.2 and the advantage positive: the objective is flat.
    assert gradient == 0.0


def test_stored_a_negative_advantage_is_not_stopped() -> None:
    _, _, gradient = weight_ratio_and_gradient(FIRST, -1.0)
    # 1.2 * 1.5, as when it is scored again.
    assert gradient == pytest.approx(-1.8)


def test_the_cap_bounds_the_distance_to_the_sampler_of_whichever_policy_is_the_numerator() -> None:
    again, _, gradient_again = weight_ratio_and_gradient(NAN, -1.0, cap=1.5)
    assert (again, gradient_again) == pytest.approx((1.5, -1.5))
    stored, _, gradient_stored = weight_ratio_and_gradient(FIRST, -1.0, cap=1.5)
    assert (stored, gradient_stored) == pytest.approx((1.2, -1.8))


def test_fresh_rows_and_padding_take_the_present_policy_without_its_gradient() -> None:
    logps = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    old = stored_policy_logps(logps, torch.tensor([[NAN, NAN], [-0.5, NAN]]))
    assert old.tolist() == [[-1.0, -2.0], [-0.5, -4.0]]
    assert not old.requires_grad
