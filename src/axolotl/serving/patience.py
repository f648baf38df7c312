"""How long one call may go on: a server that is heard of and at work is waited for however long it takes.

heard()        any sign of life
counted()      the server's work counter: grew is progress, flat for `timeout_s` is hung
moved()        progress; finished(): a part of the answer itself
lost()         contact is lost: from here on a deadline runs, `timeout_s` after the last sign of life
"""

from __future__ import annotations

from axolotl.serving.handshake import FIRST_POLL_INTERVAL_S, POLL_INTERVAL_S, Ticker
from axolotl.serving.transport import Lost

CONTACT_S = 30.0
LEAST_CONTACT_S = 5.0
LOOKS_PER_TIMEOUT = 4
MAX_FRUITLESS = 20


class Patience:
    """Used by the thread of its call. doing: what it is, for messages. nested: it is part of a recovery, which has the
    deadline."""

    def __init__(self, doing: str, timeout_s: float, ticker: Ticker, *, is_nested: bool = False) -> None:
        self.doing = doing
        self.is_nested = is_nested
        self.timeout_s = timeout_s
        self.instance_id: str | None = None
        self._refusals: set[tuple[str, str | None]] = set()
        self._num_fruitless = 0
        self._clock = ticker.clock
        self.heard_at = self._moved_at = ticker.clock()
        self._counted: tuple[str | None, int] | None = None
        self._deadline: float | None = None
        self._interval = FIRST_POLL_INTERVAL_S
        self._has_second_chance = True

    def heard(self) -> None:
        """Any sign of life."""
        self.heard_at = self._clock()

    def asked(self) -> None:
        """One exchange begins, or goes on after the caller's own business: from now on the server has to work."""
        self._moved_at = self._clock()

    def counted(self, instance_id: str | None, work: int) -> None:
        """The work counter of a process, as it is now.

        Raises:
            Lost: it has stood still for `timeout_s` (`is_hung`).
        """
        self.heard()
        before, self._counted = self._counted, (instance_id, work)
        if before is None or before[0] != instance_id:
            return
        if work > before[1]:
            self.moved()
        elif self._clock() - self._moved_at >= self.timeout_s:
            raise Lost(f"processed 0 tokens in {self.timeout_s:.0f} s", is_hung=True)

    def moved(self) -> None:
        """Progress: the server is at work, though the request may fail again."""
        self.heard()
        self.asked()
        self._deadline = None
        self._interval = FIRST_POLL_INTERVAL_S
        self._has_second_chance = True

    def finished(self) -> None:
        """A part of the answer is here: whatever went wrong before is over."""
        self.moved()
        self._refusals.clear()
        self._num_fruitless = 0

    def lost(self) -> None:
        """The call has failed once more."""
        self._num_fruitless += 1
        self.pause()

    def pause(self) -> None:
        """The deadline runs, if it does not yet."""
        if self._deadline is None:
            self._deadline = self.heard_at + self.timeout_s

    def extend(self) -> None:
        """The server was started again, or says that it loads."""
        self._deadline = self._clock() + self.timeout_s
        self._has_second_chance = True

    def left(self) -> float:
        return self.timeout_s if self._deadline is None else max(0.0, self._deadline - self._clock())

    def is_over(self) -> bool:
        return self.left() <= 0

    def is_fruitless(self) -> bool:
        return self._num_fruitless > MAX_FRUITLESS

    def was_refused(self, code: str) -> bool:
        """Whether it is the request and not the moment: the same process says the same twice, or the second one too
        cannot load what was pushed."""
        refusal = (code, None if code == "E-SRV-23" else self.instance_id)
        known = refusal in self._refusals
        self._refusals.add(refusal)
        return known

    def second_chance(self) -> bool:
        """True once: a server that came back in the last moment may still be asked."""
        had, self._has_second_chance = self._has_second_chance, False
        return had

    def contact_s(self) -> float:
        """Longest time without a line."""
        contact = min(CONTACT_S, self.timeout_s)
        return max(min(contact, self.left()), min(contact, LEAST_CONTACT_S))

    def look_s(self) -> float:
        """Longest time without an answer before the work counter is looked at."""
        return min(self.contact_s(), self.timeout_s / LOOKS_PER_TIMEOUT)

    def next_interval(self) -> float:
        """Before the next try: from 0.1 to 2 s, never far beyond the deadline."""
        interval, self._interval = self._interval, min(POLL_INTERVAL_S, 2 * self._interval)
        return min(interval, max(self.left(), 0.01))
