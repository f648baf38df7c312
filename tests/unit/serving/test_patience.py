"""When repeating a call is given up: tokens alone are no answer."""

from __future__ import annotations

import pytest

from axolotl.errors import ServerError
from axolotl.serving.handshake import Ticker
from axolotl.serving.holding import Holding
from axolotl.serving.patience import MAX_FRUITLESS, Patience
from axolotl.serving.recovery import Recovery
from axolotl.serving.transport import Lost

TICKER = Ticker(sleep=lambda _: None, clock=lambda: 0.0)


def test_only_a_finished_group_forgets_refusals() -> None:
    patience = Patience("generate", 20.0, TICKER)
    patience.instance_id = "one"
    assert not patience.was_refused("E-SRV-21")
    patience.moved()
    assert patience.was_refused("E-SRV-21")
    patience.finished()
    assert not patience.was_refused("E-SRV-21")


def test_what_decodes_and_fails_again_and_again_is_given_up() -> None:
    class Unused:
        url = "http://127.0.0.1:1"

    class Moved(Holding):
        """Another thread recovers each time at once."""

        @property
        def instance_id(self) -> str | None:
            return "other"

    holding = Moved(Unused(), TICKER)  # type: ignore[arg-type]
    recovery = Recovery(Unused(), holding, 20.0, TICKER, lambda _: None, None)  # type: ignore[arg-type]
    patience = Patience("generate", 20.0, TICKER)
    for _ in range(MAX_FRUITLESS):
        patience.moved()
        recovery.again(Lost("cut its answer short"), patience)
    patience.moved()
    with pytest.raises(ServerError, match="no progress"):
        recovery.again(Lost("cut its answer short"), patience)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def patience_of(timeout_s: float) -> tuple[Patience, Clock]:
    clock = Clock()
    return Patience("push", timeout_s, Ticker(sleep=lambda _: None, clock=clock)), clock


def test_a_counter_that_grows_is_waited_for_and_one_that_stands_is_hung() -> None:
    patience, clock = patience_of(20.0)
    for clock.now in (15.0, 30.0, 45.0):
        patience.counted("one", int(clock.now))
    clock.now = 64.0
    patience.counted("one", 45)
    clock.now = 65.0
    with pytest.raises(Lost, match="processed 0 tokens in 20 s") as lost:
        patience.counted("one", 45)
    assert lost.value.is_hung


def test_a_first_look_and_another_process_say_nothing_about_progress() -> None:
    patience, clock = patience_of(1.0)
    clock.now = 5.0
    patience.counted("one", 7)
    clock.now = 10.0
    patience.counted("two", 3)
    with pytest.raises(Lost):
        patience.counted("two", 3)


def test_the_deadline_counts_from_the_last_sign_of_life() -> None:
    patience, clock = patience_of(20.0)
    patience.counted("one", 0)
    clock.now = 100.0
    patience.counted("one", 1)
    clock.now = 105.0
    patience.lost()
    assert patience.left() == 15.0
    patience.moved()
    clock.now = 200.0
    assert patience.left() == 20.0


@pytest.mark.parametrize(("timeout_s", "contact_s", "look_s"), [(300.0, 30.0, 30.0), (5.0, 5.0, 1.25)])
def test_a_line_a_second_is_contact_at_the_smallest_timeout(timeout_s: float, contact_s: float, look_s: float) -> None:
    patience, _ = patience_of(timeout_s)
    assert (patience.contact_s(), patience.look_s()) == (contact_s, look_s)
