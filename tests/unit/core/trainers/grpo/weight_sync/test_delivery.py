import pytest
import torch

from axolotl.core.trainers.grpo.weight_sync.delivery import check_reached, require_finite
from axolotl.errors import NumericError, SyncError


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_pushed(value: float) -> None:
    tensors = {"good": torch.ones(3), "bad": torch.tensor([1.0, value]), "ids": torch.ones(2).long()}
    with pytest.raises(NumericError, match="bad and 0 more") as caught:
        require_finite(tensors, 4)
    assert (caught.value.code, caught.value.exit_code) == ("E-NUM-02", 8)


def test_large_weights_are_finite_though_their_sum_is_not() -> None:
    require_finite({"large": torch.full((4,), 6e4, dtype=torch.float16)}, 1)


def test_a_part_of_the_modules_is_not_enough() -> None:
    check_reached(14, 14, "adapter version 1")
    with pytest.raises(SyncError, match="13 of 14 places") as caught:
        check_reached(13, 14, "adapter version 1")
    assert caught.value.code == "E-SYN-04"
