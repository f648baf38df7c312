"""Groups in step with training: made when they are asked for, on the thread that asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.types import CompletionGroup, Order


class SyncProducer:
    """The synchronous `DataProducer`: nothing is made before it is wanted, so nothing is ever stale."""

    depth = 0
    metrics: Mapping[str, float] = {}

    def __init__(self, maker: GroupMaker) -> None:
        self._maker = maker
        self._placed: deque[Order] = deque()

    @property
    def placed(self) -> Sequence[Order]:
        return tuple(self._placed)

    def place(self, order: Order) -> None:
        self._placed.append(order)

    def adopt(self, order: Order, groups: Sequence[tuple[int, CompletionGroup]]) -> None:
        raise AssertionError("nothing is made in advance, so no checkpoint holds any")

    def finished(self) -> list[tuple[Order, list[tuple[int, CompletionGroup]]]]:
        return []

    def groups(self) -> Iterator[tuple[int, CompletionGroup]]:
        order = self._placed[0]
        for number, finished in enumerate(self._maker.make(order), 1):
            if number == len(order.slots):
                # Not before: a checkpoint in the middle of the step has to know of it.
                self._placed.popleft()
            yield finished

    def drain(self) -> None:
        """Nothing is being made."""

    def close(self) -> None:
        self._maker.backend.close()
