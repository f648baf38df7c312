"""What became of every completion: each ends in exactly one class, and the classes add up to what was asked for.

A completion is put where its way ended first:

    replayed      it came out of the replay buffer; it had been counted when it was fresh
    failed        it never came, or was not what had been asked for, or the optimizer did not take its step
    stale         it came too late: its policy was older than `trl.max_staleness` allows
    unscorable    every reward function abstained
    truncated     cut off at the length limit, with `mask_truncated_completions` on
    zero_signal   the rewards of its group do not differ
    masked        no token of it was left: importance mask, off-policy mask, or no known sampling log-prob
    trained       it had a part in the policy's gradient

So a truncated completion of a group without signal is `truncated`, a masked one of such a group `zero_signal`, and all
fresh ones of a step that was skipped for a number that is not finite are `failed`.
`failed` and `stale` completions have no rows in a batch and are given as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from axolotl.errors import InternalError


class Fate(Enum):
    """In the order in which the classes are tried; the value is the class's name in metrics."""

    REPLAYED = "replayed"
    FAILED = "failed"
    STALE = "stale"
    UNSCORABLE = "unscorable"
    TRUNCATED = "truncated"
    ZERO_SIGNAL = "zero_signal"
    MASKED = "masked"
    TRAINED = "trained"


@dataclass(frozen=True)
class Facts:
    """What is known of the N completions of a batch, each `[N]` bool; None where it holds for none.

    has_signal: of the completion's group. is_truncated: cut off, and for that reason out of the loss. is_masked: no
    token was left in the policy's loss.
    """

    has_signal: torch.Tensor
    is_replayed: torch.Tensor | None = None
    is_unscorable: torch.Tensor | None = None
    is_truncated: torch.Tensor | None = None
    is_masked: torch.Tensor | None = None


@dataclass(frozen=True)
class Counts:
    """Completions by class, of one step or of many."""

    replayed: int = 0
    failed: int = 0
    stale: int = 0
    unscorable: int = 0
    truncated: int = 0
    zero_signal: int = 0
    masked: int = 0
    trained: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{fate.value: self.of(fate) + other.of(fate) for fate in Fate})

    def of(self, fate: Fate) -> int:
        return int(getattr(self, fate.value))

    @property
    def total(self) -> int:
        return sum(self.of(fate) for fate in Fate)

    def as_dict(self) -> dict[str, int]:
        return {fate.value: self.of(fate) for fate in Fate}

    def metrics(self) -> dict[str, float]:
        return {f"ledger/{name}": float(count) for name, count in self.as_dict().items()}


def fates(facts: Facts) -> list[Fate]:
    """The class of every completion of a batch."""
    tried = (
        (Fate.REPLAYED, facts.is_replayed),
        (Fate.UNSCORABLE, facts.is_unscorable),
        (Fate.TRUNCATED, facts.is_truncated),
        (Fate.ZERO_SIGNAL, ~facts.has_signal),
        (Fate.MASKED, facts.is_masked),
    )
    found = [Fate.TRAINED] * facts.has_signal.shape[0]
    for fate, holds in reversed(tried):
        if holds is not None:
            assert holds.shape == facts.has_signal.shape, (fate, holds.shape, facts.has_signal.shape)
            for row in holds.nonzero().flatten().tolist():
                found[row] = fate
    return found


def tally(facts: Facts, *, failed: int = 0, stale: int = 0) -> Counts:
    """The counts of one step: those of its batch, and those that never got there."""
    found = fates(facts)
    return Counts(**{fate.value: found.count(fate) for fate in Fate}) + Counts(failed=failed, stale=stale)


@dataclass(frozen=True)
class Ledger:
    """The run so far. ordered: completions that finished steps had asked the generator for, repetitions of failed and
    stale ones included. replayed: completions that these steps took out of the replay buffer."""

    ordered: int = 0
    replayed: int = 0
    counts: Counts = Counts()

    def plus(self, counts: Counts, *, ordered: int, replayed: int = 0) -> Ledger:
        """With one more step."""
        return Ledger(self.ordered + ordered, self.replayed + replayed, self.counts + counts)

    def balance(self) -> None:
        """Raise `InternalError` unless every completion is in exactly one class."""
        fresh = self.counts.total - self.counts.replayed
        if (fresh, self.counts.replayed) == (self.ordered, self.replayed):
            return
        shown = ", ".join(f"{name} {count}" for name, count in self.counts.as_dict().items() if count)
        raise InternalError(
            f"the ledger does not balance: {self.ordered} completions ordered and {self.replayed} replayed, "
            f"{fresh} and {self.counts.replayed} accounted for",
            why=shown or "nothing was accounted for",
            do="please report",
        )

    def as_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"ordered": self.ordered, "drawn": self.replayed, **self.counts.as_dict()}

    @classmethod
    def from_json(cls, values: Mapping[str, int]) -> Ledger:
        """Raises `KeyError` for a mapping that `as_json` did not make."""
        counts = Counts(**{fate.value: values[fate.value] for fate in Fate})
        return cls(values["ordered"], values["drawn"], counts)
