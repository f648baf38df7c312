"""A server that is lost, restarted or hung is a pause, not an error.

    call fails with Lost ─► wait until it is ready ─► claim, push, prove again ─► make what is missing of the call again
            ▲                  │ over the deadline         │ lost once more
            └── the caller     ▼                           └──► wait again, within the same deadline
                               managed: killed and started again, while its budget lasts
                               else: E-SRV-04 (nobody there) or E-SRV-05 (there, without progress)

The deadline is `timeout_s` after the last contact; only progress moves it: a finished group, or tokens. A server that
says that it is loading has as long as a first start (`LOADING_S`), unless it begins again and again. Tokens alone do
not help for ever: what fails `MAX_FRUITLESS` times in a row without a finished group is given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from axolotl.errors import AxolotlError, ServerError
from axolotl.serving.handshake import REPORT_INTERVAL_S, Say, Ticker, Unready, loading_limit, poll
from axolotl.serving.holding import Holding
from axolotl.serving.patience import Patience
from axolotl.serving.transport import Lost, Transport

MAX_STARTS = 5
LOCK_POLL_S = 0.2

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


@dataclass
class _Pause:
    """suspect: the instance that is to be killed when managed. loading: those that were seen to load. was_away: it was
    seen not to be ready. said: which instance loads, in its own words, and since when it says that."""

    began: float
    next_report: float
    suspect: str
    loading: set[str | None] = field(default_factory=set)
    was_away: bool = False
    said: tuple[str | None, str] = (None, "")
    said_at: float = 0.0


class Recovery:
    """Decides what follows a `Lost`. `again` may be called from any thread; one of them recovers, the others wait.

    The lock is held by whoever recovers, and by whoever is `undisturbed`. A thread that recovers is the owner; until it
    is done the others ask the server nothing, which has lost its claim or some of its versions.
    """

    def __init__(
        self, transport: Transport, holding: Holding, timeout_s: float, ticker: Ticker, say: Say, keeper: Keeper | None
    ) -> None:
        self._transport = transport
        self._holding = holding
        self._timeout_s = timeout_s
        self._ticker = ticker
        self._say = say
        self._keeper = keeper
        self._lock = threading.RLock()
        self._owner: int | None = None

    def patience(self, doing: str) -> Patience:
        return Patience(doing, self._timeout_s, self._ticker, is_nested=self._owner == threading.get_ident())

    def run(self, doing: str, call: Callable[[Patience], T]) -> T:
        """`call`, made again until it is answered. Raises its own errors, and as `again`."""
        patience = self.patience(doing)
        while True:
            self.begin(patience)
            try:
                return self._watched(call, patience)
            except Lost as lost:
                self.again(lost, patience)

    def begin(self, patience: Patience) -> None:
        """Before each try: return when no other thread recovers."""
        while True:
            # In this order: after a recovery that begins later another instance answers, which is no answer.
            patience.instance_id = self._holding.instance_id
            if self._owner in (None, threading.get_ident()):
                return
            self._ticker.sleep(LOCK_POLL_S)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """No other thread recovers while the block runs: what several calls change together is not put back halfway.
        Waits for one that recovers now, whose deadline ends that wait. A call in the block that is lost recovers."""
        self._acquire()
        try:
            yield
        finally:
            self._lock.release()

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
            with suppress(Lost):  # which the next try finds as well
                self._holding.look(patience)
            if patience.is_over():
                raise lost.refusal or self._too_long(None, lost, patience)
            self._ticker.sleep(patience.next_interval())
            return
        if self._acquire():
            # What the other thread needed was not this call's time.
            patience.extend()
        try:
            if self._holding.instance_id != patience.instance_id:
                return  # another thread was here first
            self._owner = threading.get_ident()
            try:
                self._recover(lost, patience)
            finally:
                self._owner = None
        finally:
            self._lock.release()

    def _acquire(self) -> bool:
        """Take the lock, at once or after another thread; whether it was the latter, which may take minutes and can be
        interrupted."""
        has_waited = False
        while not self._lock.acquire(timeout=LOCK_POLL_S):
            has_waited = True
            self._ticker.sleep(0.0)
        return has_waited

    def _watched(self, call: Callable[[Patience], T], patience: Patience) -> T:
        try:
            return call(patience)
        except AxolotlError as error:
            if (meant := self._holding.explain(error)) is not error:
                raise meant from error
            raise

    def _recover(self, lost: Lost, patience: Patience) -> None:
        now = self._ticker.clock()
        instance = self._holding.instance_id or ""
        pause = _Pause(now, now + REPORT_INTERVAL_S, instance)
        self._say(
            f"pause ({patience.doing}): the server at {self._transport.url} {lost.reason}; {self._plan(lost, patience)}"
        )
        while True:
            self._revive(lost, patience, pause)
            try:
                self._wait(lost, patience, pause)
                was_forgotten = self._holding.restore(patience)
                break
            except Lost as once_more:
                lost = once_more
                patience.pause()
                self._ticker.sleep(patience.next_interval())
        self._say_end(pause, was_forgotten)
        if not pause.was_away and not was_forgotten:
            # It was there all the time: do not ask too often.
            self._ticker.sleep(patience.next_interval())

    def _plan(self, lost: Lost, patience: Patience) -> str:
        """What is done about it, in words."""
        if lost.is_hung:
            return "giving it up" if self._keeper is None else "it is killed and started again"
        left = patience.left()
        return f"waiting up to {left:.0f} s" if left >= 1 else "asking it once more"

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
            if problem is not None and problem.state == "loading":
                self._loads(problem, patience, pause)
            if patience.is_over():
                self._over(problem, lost, patience, pause)
            self._report(problem, patience, pause)
            self._ticker.sleep(patience.next_interval())

    def _loads(self, problem: Unready, patience: Patience, pause: _Pause) -> None:
        """That is contact, for as long as a first start may take. Who starts it again and again has no progress."""
        pause.suspect = problem.instance_id or pause.suspect
        pause.loading.add(problem.instance_id)
        if pause.said != (problem.instance_id, problem.why):
            pause.said, pause.said_at = (problem.instance_id, problem.why), self._ticker.clock()
        if self._ticker.clock() - pause.said_at >= loading_limit(self._timeout_s):
            return
        if self._keeper is not None or len(pause.loading) <= MAX_STARTS:
            patience.heard()
            patience.extend()

    def _over(self, problem: Unready | None, lost: Lost, patience: Patience, pause: _Pause) -> None:
        """The deadline: a managed server that says nothing is killed; all else is the end."""
        if self._keeper is None or (problem is not None and problem.state != "absent"):
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
