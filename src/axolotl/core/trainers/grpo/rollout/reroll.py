"""Prompts all of whose completions failed, kept to be tried again later in the run.

    score ─► learn ─► RerollQueue ─► take ─► slots ─► the order of a later step

Main thread, where orders are decided. Every rank has a queue of the prompts that failed on it; the queue's size and
the limit of a batch are the rank's shares of totals over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from axolotl.core.trainers.grpo.types import CompletionGroup, Slot


@dataclass(frozen=True)
class RerollSpec:
    """capacity: prompts that may wait on this rank. start_step: the first optimizer step that may try one again.
    num_ranks, rank: so that no two ranks draw a prompt with the same seeds."""

    capacity: int
    start_step: int
    num_ranks: int = 1
    rank: int = 0


def first_reroll_step(start_fraction: float, planned_steps: int) -> int:
    """The first step that may try prompts again; `planned_steps`, which never comes, at fraction 1.0."""
    # 0.07 * 100 is a little more than 7 in binary.
    return math.ceil(round(start_fraction * planned_steps, 6))


def most_rerolls(start_step: int, planned_steps: int, max_groups: int, steps_per_rollout: int = 1) -> int:
    """How many prompts of all ranks the run can try again: more need not wait."""
    return max_groups * math.ceil(max(0, planned_steps - start_step) / steps_per_rollout)


class RerollQueue:
    """Row numbers of failed prompts, first in, first out, each once."""

    def __init__(self, spec: RerollSpec) -> None:
        self.spec = spec
        # A dict keeps the order and finds a row at once.
        self._waiting: dict[int, None] = {}
        self._times_taken: dict[int, int] = {}
        self.dropped = 0

    @property
    def waiting(self) -> tuple[int, ...]:
        """Rows that wait, the next one first."""
        return tuple(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def learn(self, groups: Sequence[CompletionGroup], rewards: torch.Tensor, threshold: float) -> None:
        """Queue the prompts of a step that failed, in the order of their rows, and forget those that did not.

        All of a step at once: the order in which a server finished them then makes no difference.
        A group failed when every completion that could be scored has a weighted reward of at most `threshold`. A prompt
        that waits already keeps its place. One that does not fit is dropped and counted: those before it waited longer.
        A group that could not be scored at all shows neither success nor failure, and changes nothing.

        Args:
            rewards: `[M, G]` weighted rewards, NaN where unscorable.
        """
        is_unscorable = rewards.isnan().all(dim=1).tolist()
        has_failed = (rewards.isnan() | (rewards <= threshold)).all(dim=1).tolist()
        rows = [group.row.index for group in groups]
        for row, unscorable, failed in sorted(zip(rows, is_unscorable, has_failed, strict=True)):
            if not unscorable:
                self._learn(row, failed)

    def _learn(self, row: int, failed: bool) -> None:
        if not failed:
            self._waiting.pop(row, None)
        elif row not in self._waiting:
            if len(self._waiting) < self.spec.capacity:
                self._waiting[row] = None
            else:
                self.dropped += 1

    def take(self, step: int, limit: int, *, exclude: Collection[int] = ()) -> tuple[Slot, ...]:
        """Up to `limit` prompts for the order of optimizer step `step`, which leave the queue; none before the start.

        Args:
            exclude: rows that are in the batch anyway; they are passed over and keep their place.
        """
        if step < self.spec.start_step:
            return ()
        rows = [row for row in self._waiting if row not in exclude][:limit]
        return tuple(self._take(row) for row in rows)

    def _take(self, row: int) -> Slot:
        del self._waiting[row]
        times = self._times_taken.get(row, 0)
        self._times_taken[row] = times + 1
        # 1, 2, 3, .. on one rank. A prompt can have failed on two ranks in different epochs, and both may draw it again
        # in the same one: their numbers interleave, so the seeds differ.
        return Slot(row, reroll=1 + self.spec.rank + times * self.spec.num_ranks)

    def state(self) -> dict[str, Any]:
        """What JSON can hold and `restore` takes. Rows that were taken and not learned are in the pending orders."""
        return {
            "waiting": list(self._waiting),
            "times_taken": [[row, times] for row, times in self._times_taken.items()],
            "dropped": self.dropped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; what does not fit a capacity that is smaller now is left out."""
        self._waiting = dict.fromkeys(state["waiting"][: self.spec.capacity])
        self._times_taken = dict(state["times_taken"])
        self.dropped = state["dropped"]


def slots(fresh: Sequence[int], taken: Sequence[Slot]) -> tuple[Slot, ...]:
    """The slots of an order: prompts tried again stand in the last ones, and what they displace is left out.

    fresh: rows that the sampler has for the step, at least as many as are taken.
    """
    assert len(taken) <= len(fresh), (len(taken), len(fresh))
    return (*(Slot(row) for row in fresh[: len(fresh) - len(taken)]), *taken)


def reroll_metrics(queue: RerollQueue, order: Sequence[Slot]) -> dict[str, float]:
    """Prompts that wait, that did not fit so far, and that this step tries again, on this rank."""
    return {
        "reroll/size": float(len(queue)),
        "reroll/dropped": float(queue.dropped),
        "reroll/groups": float(sum(slot.reroll > 0 for slot in order)),
    }
