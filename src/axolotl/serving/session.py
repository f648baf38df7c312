"""Which run the server works for. A server outlives runs: a claim resets it, so no run sees what another left."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from axolotl.serving.adapters import AdapterRegistry
from axolotl.serving.fingerprint import differences
from axolotl.serving.refusals import Refusal
from axolotl.serving.wire import Fingerprint, SessionRequest

ACTIVE_S = 600.0


@dataclass
class Holder:
    """The run that holds the server. started: when its process started, None where that cannot be known."""

    run_id: str
    host: str
    pid: int
    started: float | None
    last_seen: float


def process_started(host: str, pid: int) -> float | None:
    """When the process started, None when it is on another host, unknown or dead."""
    if host != socket.gethostname():
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


class Session:
    """Claims and releases, one at a time. A holder on this host is live as long as its process; one elsewhere, or
    one whose process cannot be seen from here, as long as it was active within the last `ACTIVE_S` seconds."""

    def __init__(
        self,
        registry: AdapterRegistry,
        fingerprint: Fingerprint,
        *,
        clock: Callable[[], float] = time.monotonic,
        started: Callable[[str, int], float | None] = process_started,
    ) -> None:
        self._registry = registry
        self._fingerprint = fingerprint
        self._clock = clock
        self._started = started
        self._lock = asyncio.Lock()
        self._holder: Holder | None = None

    @property
    def run_id(self) -> str | None:
        return self._holder.run_id if self._holder else None

    def touch(self) -> None:
        """The holder did something."""
        if self._holder is not None:
            self._holder.last_seen = self._clock()

    async def claim(self, request: SessionRequest) -> None:
        """Give the server to a run, or renew or release its claim. Raises a 409 `Refusal` otherwise."""
        async with self._lock:
            if request.action == "release":
                self._release(request.run_id)
                return
            if request.action == "renew":
                self.check_run(request.run_id)
                self.touch()
                return
            unequal = differences(self._fingerprint, request.fingerprint)
            if unequal:
                raise Refusal(
                    409,
                    "E-SRV-07",
                    f"the server serves {self._fingerprint.base_model}, "
                    f"the config trains {request.fingerprint.base_model}",
                    why="differing: " + "; ".join(unequal) + " (server vs trainer)",
                    do="start the server with the config that is being trained",
                )
            if self.run_id != request.run_id:
                self._check_free(request)
            started = self._started(request.host, request.pid)
            self._holder = Holder(request.run_id, request.host, request.pid, started, self._clock())
            await self._registry.reset(request.run_id)

    def check_run(self, run_id: str) -> None:
        """Raise a 409 `Refusal` unless `run_id` holds the server."""
        if self.run_id != run_id:
            raise Refusal(
                409,
                "E-SRV-06",
                f"run {run_id} does not hold this server",
                why=f"it is held by {self.run_id or 'no run'}",
                do="claim it first",
            )

    def _release(self, run_id: str) -> None:
        """Free the server. The last policy stays until the next claim: people ask it what the run has learnt."""
        if self.run_id == run_id:
            self._holder = None

    def _check_free(self, request: SessionRequest) -> None:
        holder = self._holder
        if holder is None or (holder.host, holder.pid) == (request.host, request.pid):
            return
        idle = self._clock() - holder.last_seen
        if holder.started is not None:
            is_live = self._started(holder.host, holder.pid) == holder.started
        else:
            is_live = idle < ACTIVE_S or self._registry.num_in_flight > 0
        if is_live:
            raise Refusal(
                409,
                "E-SRV-06",
                f"the server is in use by run {holder.run_id}",
                why=f"host {holder.host}, pid {holder.pid}, last seen {idle:.0f} s ago",
                do="wait for that run to end or stop it, or start another server on another vllm.port",
            )
