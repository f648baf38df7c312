"""The ledger: one class a completion, the first that holds, and sums that show what was lost or counted twice."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from axolotl.core.trainers.grpo.ledger import Counts, Facts, Fate, Ledger, fates, tally
from axolotl.errors import InternalError


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_one_completion_of_every_class() -> None:
    facts = Facts(
        has_signal=flags(1, 0, 1, 1, 1, 1),
        is_replayed=flags(0, 0, 0, 0, 0, 1),
        is_unscorable=flags(0, 0, 1, 0, 0, 0),
        is_truncated=flags(0, 0, 0, 1, 0, 0),
        is_masked=flags(0, 0, 0, 0, 1, 0),
    )
    assert [fate.value for fate in fates(facts)] == [
        "trained",
        "zero_signal",
        "unscorable",
        "truncated",
        "masked",
        "replayed",
    ]
    counts = tally(facts, failed=4, stale=3)
    assert counts == Counts(1, 4, 3, 1, 1, 1, 1, 1)
    assert counts.total == 13


def test_the_first_that_holds_decides() -> None:
    """All 32 combinations, against the order that the page of the module gives."""
    rows = list(product((False, True), repeat=5))
    replayed, unscorable, truncated, silent, masked = (torch.tensor(column) for column in zip(*rows, strict=True))
    facts = Facts(~silent, replayed, unscorable, truncated, masked)
    names = ("replayed", "unscorable", "truncated", "zero_signal", "masked")
    expected = [next((name for name, holds in zip(names, row, strict=True) if holds), "trained") for row in rows]
    assert [fate.value for fate in fates(facts)] == expected


def test_what_is_not_known_holds_for_none() -> None:
    assert fates(Facts(flags(1, 0))) == [Fate.TRAINED, Fate.ZERO_SIGNAL]


def test_an_empty_step_counts_nothing() -> None:
    assert tally(Facts(flags())).total == 0


def test_a_batch_where_every_completion_is_cut_off() -> None:
    assert tally(Facts(flags(0, 0, 0, 0), is_truncated=flags(1, 1, 1, 1))) == Counts(truncated=4)


def test_flags_of_another_batch_are_refused() -> None:
    with pytest.raises(AssertionError):
        fates(Facts(flags(1, 1), is_masked=flags(1)))


def test_counts_as_metrics() -> None:
    assert Counts(trained=6, zero_signal=2).metrics() == {
        "ledger/replayed": 0.0,
        "ledger/failed": 0.0,
        "ledger/stale": 0.0,
        "ledger/unscorable": 0.0,
        "ledger/truncated": 0.0,
        "ledger/zero_signal": 2.0,
        "ledger/masked": 0.0,
        "ledger/trained": 6.0,
    }


def test_a_run_balances_step_by_step() -> None:
    ledger = Ledger()
    ledger = ledger.plus(Counts(trained=6, zero_signal=2), ordered=8)
    ledger.balance()
    # A group without signal made room for one from the buffer; another had to be made twice.
    ledger = ledger.plus(Counts(trained=4, zero_signal=4, replayed=4, stale=4), ordered=12, replayed=4)
    ledger.balance()
    assert ledger.counts == Counts(trained=10, zero_signal=6, replayed=4, stale=4)
    assert (ledger.ordered, ledger.replayed) == (20, 4)


@pytest.mark.parametrize(
    ("counts", "ordered", "replayed"),
    [
        (Counts(trained=7), 8, 0),
        (Counts(trained=8, masked=1), 8, 0),
        (Counts(trained=8), 8, 4),
        # The sum is right, but what was replayed was counted as fresh.
        (Counts(trained=12), 8, 4),
        (Counts(), 1, 0),
    ],
)
def test_what_is_lost_or_counted_twice_is_told(counts: Counts, ordered: int, replayed: int) -> None:
    with pytest.raises(InternalError, match=rf"{ordered} completions ordered and {replayed} replayed"):
        Ledger().plus(counts, ordered=ordered, replayed=replayed).balance()


def test_the_message_names_the_classes() -> None:
    with pytest.raises(InternalError) as raised:
        Ledger().plus(Counts(trained=5, stale=2), ordered=8).balance()
    assert raised.value.why == "stale 2, trained 5"


def test_a_checkpoint_brings_it_back() -> None:
    ledger = Ledger(24, 4, Counts(4, 3, 2, 1, 5, 6, 1, 6))
    ledger.balance()
    assert Ledger.from_json(json.loads(json.dumps(ledger.as_json()))) == ledger
    with pytest.raises(KeyError):
        Ledger.from_json({"ordered": 3})
