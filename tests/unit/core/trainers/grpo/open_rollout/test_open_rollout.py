"""A rollout between its optimizer steps: cut into slices, and through the files of a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec, compute_advantages
from axolotl.core.trainers.grpo.open_rollout.files import load_open, save_open
from axolotl.core.trainers.grpo.open_rollout.parts import OpenRollout, Part, by_slice
from axolotl.core.trainers.grpo.replaying import Replay
from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.rollout.replay import ReplayBuffer, ReplaySpec
from axolotl.core.trainers.grpo.scoring import ScoredBatch, Scorer, TrainedBatch
from axolotl.core.trainers.grpo.types import RewardResult
from tests.support.replay_groups import make_group, make_kept, make_row

COLLATE = partial(collate, pad_token_id=0, eos_token_id=1)
SPEC = AdvantageSpec(2, (1.0,))
ROWS = [make_row(index) for index in range(8)]


class Words:
    """A tokenizer that only decodes."""

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in ids]


SCORER = Scorer(cast(Any, None), cast(Any, Words()), SPEC, lambda: None)


def scored(*groups: tuple[int, tuple[float, float]]) -> ScoredBatch:
    """Each a row and its two rewards; its longer completion has as many tokens as the row's number and two more."""
    batch = COLLATE([make_group(row, (1, row + 2)) for row, _ in groups])
    values = torch.tensor([[value] for _, rewards in groups for value in rewards])
    texts = [f"text {row}.{i}" for row, _ in groups for i in (0, 1)]
    result = RewardResult(values, {"column": list(texts)}, {"number": [1.0]})
    return ScoredBatch(batch, list(texts), list(texts), result, compute_advantages(values, SPEC))


def plain(*groups: tuple[int, tuple[float, float]]) -> Part:
    made = scored(*groups)
    return Part(made, TrainedBatch(made.batch, made.advantages))


def replaced(recomputes: bool = True) -> Part:
    """Rows 3, 4, 5; the buffer has row 7 for row 4, which has no signal."""
    kept = make_kept(7, lengths=(2, 1))
    if not recomputes:
        kept = type(kept)(kept.group, kept.rewards, kept.step, kept.signal, ((-1.0, -2.0), (-3.0,)))
    replay = Replay(ReplayBuffer(ReplaySpec(4, 16, 0), [kept]), SPEC, recomputes)
    made = scored((3, (0.0, 1.0)), (4, (1.0, 1.0)), (5, (2.0, 0.0)))
    return Part(made, *replay.stand_in(made, COLLATE, step=5, skip=0))


def rows_of(parts: list[Part]) -> list[tuple[int, list[int], list[int]]]:
    """Slice, rows that were made, rows that are trained."""
    return [
        (p.number, [g.row.index for g in p.scored.batch.groups], [g.row.index for g in p.trained.batch.groups])
        for p in parts
    ]


def test_a_chunk_is_cut_into_the_slices_of_its_places() -> None:
    part = plain((0, (0.0, 1.0)), (1, (3.0, 3.0)), (2, (2.0, 1.0)))
    first, second = by_slice(part, [0, 2, 3], 2, COLLATE)
    assert rows_of([first, second]) == [(0, [0], [0]), (1, [1, 2], [1, 2])]
    assert first.trained.batch is first.scored.batch
    assert torch.equal(second.trained.advantages.values, part.trained.advantages.values[2:])
    assert second.trained.advantages.has_signal.tolist() == [False, True]
    assert second.scored.result.values.flatten().tolist() == [3.0, 3.0, 2.0, 1.0]
    assert second.scored.prompts == ["text 1.0", "text 1.1", "text 2.0", "text 2.1"]


def test_a_chunk_of_one_slice_stays_as_it_is() -> None:
    part = plain((0, (0.0, 1.0)), (1, (3.0, 3.0)))
    (only,) = by_slice(part, [2, 3], 2, COLLATE)
    assert only.number == 1 and only.trained is part.trained


def test_what_replay_brought_goes_with_its_slice() -> None:
    first, second = by_slice(replaced(recomputes=False), [0, 1, 2], 2, COLLATE)
    assert rows_of([first, second]) == [(0, [3, 4], [3, 7]), (1, [5], [5])]
    assert first.replaced is not None and first.replaced.displaced == (1,)
    assert [origin.is_replayed for origin in first.replaced.origins] == [False, True]
    assert second.replaced is not None and second.replaced.displaced == ()
    assert first.trained.stored_logps is not None
    assert first.trained.stored_logps.shape == first.trained.batch.completion_ids.shape
    assert first.trained.stored_logps[2:, :2].nan_to_num(0.0).tolist() == [[-1.0, -2.0], [-3.0, 0.0]]


def test_old_log_probs_are_those_that_were_kept_and_none_on_padding() -> None:
    part = plain((0, (0.0, 1.0)))
    part.logps = {0: torch.tensor([-1.0, -9.0]), 1: torch.tensor([-2.0, -3.0])}
    old = part.as_old().stored_logps
    assert old is not None and old[:, :1].tolist() == [[-1.0], [-2.0]]
    assert old[0, 1].isnan() and old[1, 1] == -3.0, "the first completion has one token"


def test_a_replayed_group_keeps_its_own_old_log_probs() -> None:
    part = replaced(recomputes=False)
    width = part.trained.batch.completion_ids.shape[1]
    part.logps = {row: torch.full((width,), -5.0) for row in range(6)}
    old = part.as_old().stored_logps
    assert old is not None and old[2, :2].tolist() == [-1.0, -2.0] and old[3, 0] == -3.0
    assert old[0, 0] == -5.0 and old[4, 0] == -5.0


def test_one_part_in_the_loss_of_any_step_is_enough() -> None:
    part = plain((0, (0.0, 1.0)))
    for row, is_left_out in [(0, True), (1, True), (0, False), (1, True), (0, True)]:
        part.note(row, is_left_out=is_left_out)
    assert part.has_part == {0: True, 1: False}


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_checkpoint_gives_back_what_was_open(tmp_path: Path, recomputes: bool) -> None:
    first = plain((0, (0.0, float("nan"))), (1, (3.0, 4.0)))
    first.logps = {0: torch.tensor([-0.1, -0.2, -0.3]), 3: torch.tensor([-0.25])}
    first.has_part, first.is_counted = {0: True, 3: False}, True
    second = replaced(recomputes)
    second.number = 1
    save_open(OpenRollout(4, [first, second]), tmp_path)
    again = load_open(tmp_path, ROWS, SCORER, COLLATE)
    assert again is not None and again.step == 4
    assert rows_of(again.parts) == rows_of([first, second]) == [(0, [0, 1], [0, 1]), (1, [3, 4, 5], [3, 7, 5])]
    for ours, theirs in zip(again.parts, (first, second), strict=True):
        assert ours.logps.keys() == theirs.logps.keys()
        assert all(torch.equal(ours.logps[row], theirs.logps[row]) for row in ours.logps)
        assert (ours.has_part, ours.is_counted) == (theirs.has_part, theirs.is_counted)
        for name in ("values", "rewards", "has_signal", "is_unscorable"):
            for part in ("scored", "trained"):
                left, right = (getattr(getattr(p, part).advantages, name) for p in (ours, theirs))
                torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(
            ours.scored.result.values, theirs.scored.result.values, rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(
            ours.as_old().stored_logps, theirs.as_old().stored_logps, rtol=0, atol=0, equal_nan=True
        )
    kept, was = again.parts[1].replaced, second.replaced
    assert kept is not None and was is not None
    assert (kept.origins, kept.displaced) == (was.origins, was.displaced)
    assert [group.rewards for group in kept.groups] == [group.rewards for group in was.groups]


def test_nothing_is_open_where_nothing_was_saved(tmp_path: Path) -> None:
    assert load_open(tmp_path, ROWS, SCORER, COLLATE) is None
