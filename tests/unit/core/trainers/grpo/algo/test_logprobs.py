import math

import pytest
import torch

from axolotl.core.trainers.grpo.algo.logprobs import token_logps_and_entropies


def test_numbers_worked_by_hand() -> None:
    # Weights 1 and 3 at temperature 1: probabilities 1/4 and 3/4. At temperature 1/2 they are squared: 1/10 and 9/10.
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    logps, entropies = token_logps_and_entropies(logits, torch.tensor([[1]]), 1.0)
    assert logps.item() == pytest.approx(math.log(0.75))
    assert entropies.item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    logps, _ = token_logps_and_entropies(logits, torch.tensor([[0]]), 0.5)
    assert logps.item() == pytest.approx(math.log(0.1))


def test_the_gradient_goes_through_log_probs_only() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    logps, entropies = token_logps_and_entropies(logits, torch.zeros(2, 3, dtype=torch.long), 1.0)
    assert logps.requires_grad and not entropies.requires_grad
