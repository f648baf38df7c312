"""Filling up: ranks with fewer rows run as many forwards of as many rows as the others, and learn nothing from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.algo.advantages import Advantages
from axolotl.core.trainers.grpo.microbatch import MicroBatch, StepTotals, split
from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.scoring import TrainedBatch
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow


def trained() -> TrainedBatch:
    """Two groups of two, of 3, 1, 2 and 2 tokens."""
    lengths = [(3, 1), (2, 2)]
    groups = [
        CompletionGroup(
            PromptRow(index, "p", (1, 2), {}),
            tuple(Completion((5,) * n, (-1.0,) * n, False, 1, "i") for n in pair),
        )
        for index, pair in enumerate(lengths)
    ]
    batch = collate(groups, pad_token_id=0, eos_token_id=2)
    values = torch.tensor([1.0, -1.0, 0.5, -0.5])
    return TrainedBatch(batch, Advantages(values, values, torch.ones(2).bool(), torch.zeros(4).bool()))


def cut(loss_type: str = "dapo", **options: Any) -> list[MicroBatch]:
    return split(
        trained(),
        StepTotals(rows=4, tokens=8.0, all_tokens=16.0),
        micro_batch_size=2,
        loss_type=loss_type,
        mask_truncated=False,
        device=torch.device("cpu"),
        **options,
    )


def test_as_many_rows_as_another_rank_has() -> None:
    first, second, third = cut(rows=[2, 3, 0], num_rows=5)
    assert [one.inputs["completion_ids"].shape[0] for one in (first, second, third)] == [2, 2, 1]
    assert [one.rows for one in (first, second, third)] == [(2, 3), (0,), ()]
    assert [one.prompts for one in (first, second, third)] == [(1, 1), (0,), ()]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_what_is_filled_up_has_no_weight(loss_type: str) -> None:
    _, second, third = cut(loss_type, rows=[2, 3, 0], num_rows=5)
    assert second.inputs["completion_mask"].sum(dim=1).tolist() == [3, 0]
    assert second.inputs["advantages"].tolist() == [1.0, 0.0]
    assert not third.inputs["completion_mask"].any() and not third.inputs["advantages"].any()
    assert third.share > 0, "it is divided by"


def test_a_rank_without_rows_runs_all_the_same() -> None:
    (only,) = cut(rows=[], num_rows=2)
    assert only.rows == () and only.inputs["completion_ids"].shape[0] == 2
    assert not only.inputs["completion_mask"].any()


def test_shares_of_rows_that_count_are_what_they_are_without() -> None:
    plain, filled = cut(rows=[2, 3]), cut(rows=[2, 3], num_rows=4)
    assert plain[0].share == filled[0].share == pytest.approx(4 / 8)
    assert sum(one.share for one in filled) == pytest.approx(plain[0].share)
