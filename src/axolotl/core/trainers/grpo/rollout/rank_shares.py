"""Sizes that the config gives for the whole run, cut into what each rank holds, without asking the others."""

from __future__ import annotations


def rank_share(total: int, num_ranks: int, rank: int, turn: int = 0) -> int:
    """This rank's part of a number; the parts of all ranks add up to it and differ by one at most.

    turn: the rank that is first to get one more where it does not divide. With the step as the turn, a limit of one
    a batch comes round to every rank.

    Example: 5 over 3 ranks is 2, 2, 1; at turn 1 it is 1, 2, 2.
    """
    return total // num_ranks + int((rank - turn) % num_ranks < total % num_ranks)
