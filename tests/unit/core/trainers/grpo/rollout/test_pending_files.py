"""Orders in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from axolotl.core.trainers.grpo.rollout.pending_files import load_pending, save_pending
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, Order, PromptRow, Slot

ROWS = [PromptRow(number, f"p{number}", (1, 2, number), {}) for number in range(4)]


def made(row: int, reroll: int) -> CompletionGroup:
    completions = (
        Completion((5, 6), (-0.5, float("nan")), is_truncated=False, adapter_version=3, instance_id="i1"),
        Completion((7,), (-0.25,), is_truncated=True, adapter_version=3, instance_id="i2"),
    )
    return CompletionGroup(ROWS[row], completions, reroll)


def test_orders_come_back_with_their_groups_in_their_places(tmp_path: Path) -> None:
    first = Order(7, 1, 3, (Slot(2), Slot(0, reroll=2)))
    second = Order(8, 1, 3, (Slot(1), Slot(3)))
    groups = [(1, made(0, 2)), (0, made(2, 0))]
    producer = cast(Any, SimpleNamespace(placed=(first, second), finished=lambda: [(first, groups)]))
    save_pending(producer, tmp_path, believed=3)
    (one, its_groups), (two, none) = load_pending(tmp_path, ROWS)
    assert (one, two, none) == (first, second, [])
    # repr, since NaN differs from itself.
    assert repr(its_groups) == repr([(0, made(2, 0)), (1, made(0, 2))])
    # What a version made that nobody proved is made again.
    save_pending(producer, tmp_path, believed=2)
    assert load_pending(tmp_path, ROWS) == [(first, []), (second, [])]


def test_nothing_placed_is_nothing_pending(tmp_path: Path) -> None:
    save_pending(cast(Any, SimpleNamespace(placed=(), finished=list)), tmp_path, believed=0)
    assert load_pending(tmp_path, ROWS) == []
