"""A server that is lost, restarted or hung is a pause, not an error.

    call fails with Lost ─► wait until it is ready ─► claim, push, prove again ─► make what is missing of the call again
            ▲                  │ over the deadline         │ lost once more
            └── the caller     ▼                           └──► wait again, within the same deadline
                               managed: killed and started again, while its budget lasts
                               else: E-SRV-04 (nobody there) or E-SRV-05 (there, without progress)

The deadline is `timeout_s` after the last contact; only progress moves it: a finished group, or tokens. Tokens alone do
not help for ever: what fails `MAX_FRUITLESS` times in a row without a finished group is given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from axolotl.errors import AxolotlError, ServerError
from axolotl.serving.handshake import (
    FIRST_POLL_INTERVAL_S,
    POLL_INTERVAL_S,
    REPORT_INTERVAL_S,
    Say,
    Ticker,
    Unready,
    poll,
)
from axolotl.serving.holding import Holding
from axolotl.serving.transport import Lost, Transport

CONTACT_S = 30.0
LEAST_CONTACT_S = 5.0
MAX_FRUITLESS = 20

T = TypeVar("T")


class Keeper(Protocol):
    """Whoever can start the server again. Called from any thread."""

    def revive(self, instance_id: str, *, is_hung: bool) -> None:
        """See to it that a server runs other than the instance that was lost; with `is_hung` that one is killed first.
        Returns at once. Raises `E-SRV-24` when the restarts are used up."""
        ...

    def check_alive(self) -> None:
        """Raises when the server has ended and will not be started again."""
        ...

    def served(self, instance_id: str) -> None:
        """A request was answered: all restarts may be used again."""
        ...


class Patience:
    """How long one call may go on. doing: what it is, for messages. nested: it is part of a recovery, which has the
    deadline."""

    def __init__(self, doing: str, timeout_s: float, ticker: Ticker, *, is_nested: bool = False) -> None:
        self.doing = doing
        self.is_nested = is_nested
        self.timeout_s = timeout_s
        self.instance_id: str | None = None
        self._refusals: set[tuple[str, str | None]] = set()
        self._num_fruitless = 0
        self.heard_at = ticker.clock()
        self._clock = ticker.clock
        self._deadline: float | None = None
        self._interval = FIRST_POLL_INTERVAL_S
        self._has_second_chance = True

    def heard(self) -> None:
        """Any sign of life."""
        self.heard_at = self._clock()

    def moved(self) -> None:
        """Progress: the server is at work, though the request may fail again."""
        self.heard()
        self._deadline = None
        self._interval = FIRST_POLL_INTERVAL_S
        self._has_second_chance = True

    def finished(self) -> None:
        """A part of the answer is here: whatever went wrong before is over."""
        self.moved()
        self._refusals.clear()
        self._num_fruitless = 0

    def lost(self) -> None:
        self._num_fruitless += 1
        if self._deadline is None:
            self._deadline = self.heard_at + self.timeout_s

    def extend(self) -> None:
        """The server was started again, and may load for as long as a first start may."""
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

    def next_interval(self) -> float:
        """Before the next try: from 0.1 to 2 s, never far beyond the deadline."""
        interval, self._interval = self._interval, min(POLL_INTERVAL_S, 2 * self._interval)
        return min(interval, max(self.left(), 0.01))


@dataclass
class _Pause:
    """suspect: the instance that is to be killed when managed. was_away: it was seen not to be ready."""

    began: float
    next_report: float
    suspect: str
    was_away: bool = False


class Recovery:
    """Decides what follows a `Lost`. `again` may be called from any thread; one of them recovers, the others wait."""

    def __init__(
        self, transport: Transport, holding: Holding, timeout_s: float, ticker: Ticker, say: Say, keeper: Keeper | None
    ) -> None:
        self._transport = transport
        self._holding = holding
        self._timeout_s = timeout_s
        self._ticker = ticker
        self._say = say
        self._keeper = keeper
        self._lock = threading.Lock()
        self._owner: int | None = None

    def patience(self, doing: str) -> Patience:
        return Patience(doing, self._timeout_s, self._ticker, is_nested=self._owner == threading.get_ident())

    def run(self, doing: str, call: Callable[[], T]) -> T:
        """`call`, made again until it is answered. Raises its own errors, and as `again`."""
        patience = self.patience(doing)
        while True:
            patience.instance_id = self._holding.instance_id
            try:
                return self._watched(call)
            except Lost as lost:
                self.again(lost, patience)

    def served(self, patience: Patience) -> None:
        if self._keeper is not None and patience.instance_id is not None and not patience.is_nested:
            self._keeper.served(patience.instance_id)

    def again(self, lost: Lost, patience: Patience) -> None:
        """Return when the call may be made again.

        Raises:
            ServerError: `E-SRV-04`, `E-SRV-05` over the deadline; as `Holding.restore` and `Keeper`.
        """
        if patience.is_nested:
            raise lost
        patience.lost()
        is_fault = lost.refusal is not None and not lost.is_hung and not lost.is_busy
        if lost.refusal is not None and is_fault and patience.was_refused(lost.refusal.code):
            raise lost.refusal
        if not lost.is_busy and patience.is_fruitless():
            raise lost.refusal or self._too_long(None, lost, patience)
        if lost.is_busy:
            if patience.is_over():
                raise lost.refusal or self._too_long(None, lost, patience)
            self._ticker.sleep(patience.next_interval())
            return
        with self._lock:
            if self._holding.instance_id != patience.instance_id:
                return  # another thread was here first
            self._owner = threading.get_ident()
            try:
                self._recover(lost, patience)
            finally:
                self._owner = None

    def _watched(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except AxolotlError as error:
            if (meant := self._holding.explain(error)) is not error:
                raise meant from error
            raise

    def _recover(self, lost: Lost, patience: Patience) -> None:
        now = self._ticker.clock()
        instance = self._holding.instance_id or ""
        pause = _Pause(now, now + REPORT_INTERVAL_S, instance)
        self._say(
            f"pause ({patience.doing}): the server at {self._transport.url} {lost.reason}; "
            f"waiting up to {patience.timeout_s if lost.is_hung else patience.left():.0f} s"
        )
        while True:
            self._revive(lost, patience, pause)
            try:
                self._wait(lost, patience, pause)
                was_forgotten = self._holding.restore()
                break
            except Lost as once_more:
                lost = once_more
                self._ticker.sleep(patience.next_interval())
        self._say_end(pause, was_forgotten)
        if not pause.was_away and not was_forgotten:
            # It was there all the time: do not ask too often.
            self._ticker.sleep(patience.next_interval())

    def _revive(self, lost: Lost, patience: Patience, pause: _Pause) -> None:
        if self._keeper is not None:
            self._keeper.revive(pause.suspect, is_hung=lost.is_hung)
            if lost.is_hung:
                patience.extend()
        elif lost.is_hung:
            raise lost.refusal or self._too_long(None, lost, patience)

    def _wait(self, lost: Lost, patience: Patience, pause: _Pause) -> None:
        """Return when the server can be asked."""
        while True:
            problem = poll(self._transport, patience.left())
            pause.was_away = pause.was_away or problem is not None
            if problem is None and (not patience.is_over() or (pause.was_away and patience.second_chance())):
                return
            if self._keeper is not None:
                self._keeper.check_alive()
                if problem is not None and problem.instance_id not in (None, pause.suspect):
                    # Started again: each process may load for as long as a first start may.
                    pause.suspect = problem.instance_id or pause.suspect
                    patience.extend()
            if patience.is_over():
                self._over(problem, lost, patience, pause)
            self._report(problem, patience, pause)
            self._ticker.sleep(patience.next_interval())

    def _over(self, problem: Unready | None, lost: Lost, patience: Patience, pause: _Pause) -> None:
        """The deadline: a managed server that says nothing, or loads for ever, is killed; all else is the end."""
        if self._keeper is None or (problem is not None and problem.state not in ("absent", "loading")):
            raise self._too_long(problem, lost, patience)
        self._keeper.revive(pause.suspect, is_hung=True)
        # Next time it is the process that runs by then.
        pause.suspect = self._transport.published_instance() or pause.suspect
        patience.extend()

    def _report(self, problem: Unready | None, patience: Patience, pause: _Pause) -> None:
        now = self._ticker.clock()
        if now >= pause.next_report:
            what = "is there" if problem is None else f"{problem.state}: {problem.why}"
            self._say(f"pause: the server at {self._transport.url} is {what}, {patience.left():.0f} s left")
            pause.next_report = now + REPORT_INTERVAL_S

    def _say_end(self, pause: _Pause, was_forgotten: bool) -> None:
        line = f"the server is back after {self._ticker.clock() - pause.began:.0f} s"
        if was_forgotten:
            versions = ", ".join(str(item.version) for item in self._holding.pushed) or "none"
            line += f" (instance {self._holding.instance_id}; policy versions pushed again: {versions})"
        self._say(line)

    def _too_long(self, problem: Unready | None, lost: Lost, patience: Patience) -> ServerError:
        """problem: None when the server is there."""
        silence = self._ticker.clock() - patience.heard_at
        healthy = time.strftime("%H:%M:%S", time.localtime(time.time() - silence))
        known = f"last healthy {healthy}, instance {self._holding.instance_id}"
        limit = f"{patience.timeout_s:.0f} s (trl.vllm_server_timeout)"
        restart = "restart axolotl vllm-serve, then rerun train with --resume"
        if problem is None:
            return ServerError(
                f"the server at {self._transport.url} is alive but makes no progress ({patience.doing})",
                code="E-SRV-05",
                why=f"it {lost.reason}; no tokens and no answer in {limit}; {known}",
                do=restart,
            )
        states = {"absent": problem.why, "failed": f"failed to start: {problem.why}"}
        state = states.get(problem.state, f"is {problem.state}: {problem.why}")
        return ServerError(
            f"the server at {self._transport.url} is lost ({patience.doing})",
            code="E-SRV-04",
            why=f"it {state}; not back within {limit}; {known}",
            do=restart,
        )
