import pytest

from axolotl.core.run.step_record import require_same_weights
from axolotl.errors import PeerError


@pytest.mark.parametrize("digests", [["a1"], ["a1", "a1"], [None, None]])
def test_ranks_that_learnt_the_same_go_on(digests: list[str | None]) -> None:
    require_same_weights(digests, 3)


def test_ranks_that_drifted_apart_end_before_a_checkpoint_is_written() -> None:
    with pytest.raises(PeerError, match="different weights after step 3") as problem:
        require_same_weights(["a1", "b2"], 3)
    assert problem.value.code == "E-PEER-03" and "process 1: b2" in problem.value.why
