"""When repeating a call is given up: tokens alone are no answer."""

from __future__ import annotations

import pytest

from axolotl.errors import ServerError
from axolotl.serving.handshake import Ticker
from axolotl.serving.holding import Holding
from axolotl.serving.recovery import MAX_FRUITLESS, Patience, Recovery
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

    holding = Moved(Unused(), 20.0, TICKER)  # type: ignore[arg-type]
    recovery = Recovery(Unused(), holding, 20.0, TICKER, lambda _: None, None)  # type: ignore[arg-type]
    patience = Patience("generate", 20.0, TICKER)
    for _ in range(MAX_FRUITLESS):
        patience.moved()
        recovery.again(Lost("cut its answer short"), patience)
    patience.moved()
    with pytest.raises(ServerError, match="no progress"):
        recovery.again(Lost("cut its answer short"), patience)
