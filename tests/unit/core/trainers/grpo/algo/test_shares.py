import pytest
import torch

from axolotl.core.trainers.grpo.algo.shares import TOKEN_LOSSES, loss_share

MASKS = [torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[1, 1, 1], [0, 0, 0]])]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"])
def test_the_shares_of_a_step_add_up_to_one(loss_type: str) -> None:
    assert sum(loss_share(loss_type, mask, 4, 6) for mask in MASKS) == pytest.approx(1.0)


@pytest.mark.parametrize("loss_type", sorted(TOKEN_LOSSES))
def test_means_over_tokens_are_shared_by_tokens(loss_type: str) -> None:
    assert [loss_share(loss_type, mask, 4, 6) for mask in MASKS] == pytest.approx([0.5, 0.5])
    assert loss_share(loss_type, torch.tensor([[1, 1], [1, 1]]), 4, 5) == pytest.approx(0.8)


@pytest.mark.parametrize("loss_type", sorted(TOKEN_LOSSES))
def test_a_step_without_tokens_is_shared_by_rows(loss_type: str) -> None:
    assert loss_share(loss_type, torch.zeros(1, 3), 4, 0) == pytest.approx(0.25)


def test_others_are_shared_by_rows() -> None:
    assert loss_share("grpo", torch.ones(1, 3), 4, 12) == pytest.approx(0.25)


def test_a_micro_batch_without_tokens_has_a_share_that_can_be_divided_by() -> None:
    assert 0.0 < loss_share("bnpo", torch.zeros(2, 3), 4, 6) < 1e-6
