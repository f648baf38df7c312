"""The thread that keeps a run's claim alive while the trainer computes and asks the server nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from axolotl.errors import AxolotlError
from axolotl.serving.handshake import ask_info
from axolotl.serving.transport import Lost, Transport
from axolotl.serving.wire import SessionRequest, SessionResponse

RENEWALS_PER_LEASE = 4
RENEW_TIMEOUT_S = 0.45
"""Short, so that `close` need not wait: a server that answers late has renewed all the same."""


class Lease:
    """Owner of one thread, which ends with the block. No daemon: nobody is renewed by a run that has ended.

    A server that is away is not its affair, the calls of the run notice that; nor is one that is back and has forgotten
    the run, unless `on_forgotten` says otherwise. A server that another run has taken is:
    `problem` is then what it said, for the next call to raise, and renewing ends.

    Args:
        transport: for this thread alone; closed with the block.
        claimed: the claim.
        lease_s: how long it lasts without a sign of life.
        on_forgotten: called by the thread, each time it finds that the server holds no run.
    """

    def __init__(
        self,
        transport: Transport,
        claimed: SessionRequest,
        lease_s: float,
        on_forgotten: Callable[[], None] = lambda: None,
    ) -> None:
        self.problem: AxolotlError | None = None
        self._transport = transport
        self._request = claimed.model_copy(update={"action": "renew", "sampling": None})
        self._interval_s = lease_s / RENEWALS_PER_LEASE
        self._on_forgotten = on_forgotten
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="server-lease")

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._transport.close()

    def _work(self) -> None:
        while self.problem is None and not self._stopping.wait(self._interval_s):
            try:
                self._renew()
            except (Lost, AxolotlError):
                continue

    def _renew(self) -> None:
        try:
            self._transport.post("/session/", self._request, SessionResponse, RENEW_TIMEOUT_S, None)
        except AxolotlError as refusal:
            if refusal.code != "E-SRV-06":
                return
            if ask_info(self._transport, RENEW_TIMEOUT_S).run_id is not None:
                self.problem = refusal
            else:
                # It was restarted; the next call of ours claims it again.
                self._on_forgotten()
