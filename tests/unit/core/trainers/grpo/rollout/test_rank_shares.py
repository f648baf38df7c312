from hypothesis import given
from hypothesis import strategies as st

from axolotl.core.trainers.grpo.rollout.rank_shares import rank_share


def test_what_does_not_divide_goes_to_the_low_ranks() -> None:
    assert [rank_share(5, 3, rank) for rank in range(3)] == [2, 2, 1]
    assert [rank_share(5, 3, rank, turn=1) for rank in range(3)] == [1, 2, 2]
    assert [rank_share(1, 2, rank) for rank in range(2)] == [1, 0]


@given(st.integers(0, 1000), st.integers(1, 16), st.integers(0, 100))
def test_the_shares_add_up_and_differ_by_one_at_most(total: int, num_ranks: int, turn: int) -> None:
    shares = [rank_share(total, num_ranks, rank, turn) for rank in range(num_ranks)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 50), st.integers(1, 8), st.integers(0, 50))
def test_over_as_many_turns_as_ranks_all_get_the_same(total: int, num_ranks: int, start: int) -> None:
    got = [sum(rank_share(total, num_ranks, rank, start + i) for i in range(num_ranks)) for rank in range(num_ranks)]
    assert got == [total] * num_ranks
