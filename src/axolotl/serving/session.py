"""Which run the server works for. A server outlives runs: a claim resets it, so no run sees what another left."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from axolotl.serving.engines.protocol import Engine, EngineRejects
from axolotl.serving.fingerprint import differences
from axolotl.serving.refusals import Refusal
from axolotl.serving.versions import PolicyVersions
from axolotl.serving.wire import Fingerprint, Sampling, SessionRequest

LEASE_S = 60.0
_DIGEST_SHOWN = 12


@dataclass
class Holder:
    """The run that holds the server. started: when its process started, None where that cannot be known.
    num_requests: those of it that run."""

    run_id: str
    host: str
    pid: int
    started: float | None
    last_seen: float
    num_requests: int = 0


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
    """Claims, renewals and releases, one at a time. A holder whose process can be seen from here is live as long as
    the process; one elsewhere as long as one of its requests runs or its lease does: `LEASE_S` seconds from its last
    sign of life. A holder that is not live any more may come back unless another run has claimed the server."""

    def __init__(
        self,
        versions: PolicyVersions,
        engine: Engine,
        *,
        clock: Callable[[], float] = time.monotonic,
        started: Callable[[str, int], float | None] = process_started,
    ) -> None:
        self._versions = versions
        self._engine = engine
        self._clock = clock
        self._started = started
        self._lock = asyncio.Lock()
        self._holder: Holder | None = None

    @property
    def run_id(self) -> str | None:
        """The run that holds the server and is live."""
        return self._holder.run_id if self._holder is not None and self._is_live(self._holder) else None

    @contextmanager
    def request(self, run_id: str | None) -> Iterator[None]:
        """Around a request of a run: a sign of life as long as it lasts. None, a person's question, is neither checked
        nor counted.

        Raises:
            Refusal: 409, as `check_run`.
        """
        if run_id is None:
            yield
            return
        holder = self._check_holder(run_id)
        holder.num_requests += 1
        holder.last_seen = self._clock()
        try:
            yield
        finally:
            holder.num_requests -= 1
            holder.last_seen = self._clock()

    def check_run(self, run_id: str | None) -> None:
        """Raise a 409 `Refusal` unless `run_id` holds the server, or is None."""
        if run_id is not None:
            self._check_holder(run_id)

    async def handle(self, request: SessionRequest) -> None:
        """Give the server to a run, or renew or release its claim.

        Raises:
            Refusal: 409 another run holds it or another model is trained, 422 the engine does not support an option
                of `request.sampling`.
        """
        async with self._lock:
            match request.action:
                case "release":
                    self._release(request.run_id)
                case "renew":
                    self._check_holder(request.run_id).last_seen = self._clock()
                case "claim":
                    await self._claim(request)

    async def _claim(self, request: SessionRequest) -> None:
        _check_model(self._engine.fingerprint, request.fingerprint)
        self._check_free(request)
        if request.sampling is not None:
            self._check_sampling(request.sampling)
        started = self._started(request.host, request.pid)
        # Before the reset: from here on the requests of the run before are refused.
        self._holder = Holder(request.run_id, request.host, request.pid, started, self._clock())
        try:
            await self._versions.reset(request.run_id)
        except BaseException:
            self._holder = None
            raise
        self._holder.last_seen = self._clock()

    def _check_holder(self, run_id: str) -> Holder:
        holder = self._holder
        if holder is None or holder.run_id != run_id:
            raise Refusal(
                409,
                "E-SRV-06",
                f"run {run_id} does not hold this server",
                why=f"it is held by {holder.run_id if holder else 'no run'}",
                do="claim it first",
            )
        return holder

    def _release(self, run_id: str) -> None:
        """Free the server. The last policy stays until the next claim: people ask it what the run has learnt."""
        if self._holder is not None and self._holder.run_id == run_id:
            self._holder = None

    def _check_free(self, request: SessionRequest) -> None:
        holder = self._holder
        if holder is None or holder.run_id == request.run_id:
            return
        if (holder.host, holder.pid) == (request.host, request.pid) or not self._is_live(holder):
            return
        raise Refusal(
            409,
            "E-SRV-06",
            f"the server is in use by run {holder.run_id}",
            why=f"host {holder.host}, pid {holder.pid}, last seen {self._idle(holder):.0f} s ago",
            do="wait for that run to end or stop it, or start another server on another vllm.port",
        )

    def _check_sampling(self, sampling: Sampling) -> None:
        try:
            self._engine.check_sampling(sampling)
        except EngineRejects as error:
            raise Refusal(
                422,
                "E-SRV-19",
                f"the {self._engine.name} engine does not support an option of the config: {error}",
                do="remove the option, or serve with another vllm.engine",
            ) from error

    def _is_live(self, holder: Holder) -> bool:
        if holder.started is not None:
            return self._started(holder.host, holder.pid) == holder.started
        return holder.num_requests > 0 or self._idle(holder) < LEASE_S

    def _idle(self, holder: Holder) -> float:
        return self._clock() - holder.last_seen


def _check_model(server: Fingerprint, trainer: Fingerprint) -> None:
    unequal = differences(server, trainer)
    if unequal:
        raise Refusal(
            409,
            "E-SRV-07",
            f"the server serves {server.base_model}, the config trains {trainer.base_model}",
            why=f"differing: {'; '.join(unequal)} (server vs trainer). "
            f"Server: {_digests(server)}. Trainer: {_digests(trainer)}",
            do="start the server with the config that is being trained",
        )


def _digests(fingerprint: Fingerprint) -> str:
    parts = {"config": fingerprint.config, "tokenizer": fingerprint.tokenizer, "weights": fingerprint.weights}
    return ", ".join(f"{name} {digest[:_DIGEST_SHOWN] or 'unknown'}" for name, digest in parts.items())
