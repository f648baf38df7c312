"""Orders that were placed and not trained, as files: with their groups where these are finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from axolotl.core.trainers.grpo.protocols import DataProducer
from axolotl.core.trainers.grpo.rollout.group_files import pack_groups, read_state, unpack_groups, write_state
from axolotl.core.trainers.grpo.types import CompletionGroup, Order, PromptRow, Slot

_NAME = "pending"

Pending = tuple[Order, list[tuple[int, CompletionGroup]]]


def save_pending(producer: DataProducer, directory: Path, *, believed: int) -> None:
    """Every placed order, the oldest first.

    believed: the newest version that was proven; what a later one made is not kept.
    """
    finished = {order.step: groups for order, groups in producer.finished() if order.version <= believed}
    kept = [sorted(finished.get(order.step, []), key=lambda item: item[0]) for order in producer.placed]
    records, tensors = pack_groups([group for groups in kept for _, group in groups])
    orders = [
        {**asdict(order), "num_finished": len(groups)} for order, groups in zip(producer.placed, kept, strict=True)
    ]
    write_state(directory, _NAME, {"orders": orders, "groups": records}, tensors)


def load_pending(directory: Path, rows: Sequence[PromptRow]) -> list[Pending]:
    """The orders with their groups by place; none where an order was not finished.

    Raises:
        DataError: `E-DAT-07` a prompt is another one than it was.
    """
    record, tensors = read_state(directory, _NAME)
    groups = iter(unpack_groups(record["groups"], tensors, rows))
    pending = []
    for entry in record["orders"]:
        slots = tuple(Slot(**slot) for slot in entry["slots"])
        order = Order(entry["step"], entry["epoch"], entry["version"], slots)
        pending.append((order, [(place, next(groups)) for place in range(entry["num_finished"])]))
    return pending
