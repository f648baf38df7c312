"""Which run the server works for. A server outlives runs: a claim resets it, so no run sees what another left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from axolotl.serving.engines.protocol import Engine, EngineRejects
from axolotl.serving.fingerprint import differences
from axolotl.serving.processes import ProcessTable, RunProcess
from axolotl.serving.refusals import Refusal
from axolotl.serving.run_directories import RunDirectories
from axolotl.serving.versions import PolicyVersions
from axolotl.serving.wire import Fingerprint, Sampling, SessionRequest

LEASE_S = 60.0
_DIGEST_SHOWN = 12


@dataclass
class Holder:
    """The run that holds the server. host: for people; not unique. num_requests: those that run."""

    run_id: str
    host: str
    process: RunProcess
    last_seen: float
    num_requests: int = 0


class Session:
    """Claims, renewals and releases, one at a time. A holder whose process can be seen from here is live as long as
    the process; one elsewhere, in another container for one, as long as one of its requests runs or its lease does:
    `LEASE_S` seconds from its last sign of life. A holder that is not live any more may come back unless another run
    has claimed the server, and when that one is gone; what it had published is there until then (`RunDirectories`)."""

    def __init__(
        self,
        versions: PolicyVersions,
        engine: Engine,
        directories: RunDirectories,
        *,
        clock: Callable[[], float] = time.monotonic,
        processes: ProcessTable | None = None,
    ) -> None:
        self._versions = versions
        self._engine = engine
        self._directories = directories
        self._clock = clock
        self._processes = processes or ProcessTable()
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
                    await asyncio.to_thread(self._directories.over, request.run_id)
                case "renew":
                    self._check_holder(request.run_id).last_seen = self._clock()
                    await asyncio.to_thread(self._directories.heard, request.run_id)
                case "claim":
                    await self._claim(request)

    async def _claim(self, request: SessionRequest) -> None:
        _check_model(self._engine.fingerprint, request.fingerprint)
        process = self._processes.find(request.namespace, request.pid)
        self._check_free(request.run_id, process)
        if request.sampling is not None:
            self._check_sampling(request.sampling)
        before = self._holder
        # Before the reset: from here on the requests of the run before are refused.
        self._holder = Holder(request.run_id, request.host, process, self._clock())
        try:
            await self._versions.reset()
            await asyncio.to_thread(self._keep_house, request.run_id, process, before)
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

    def _keep_house(self, run_id: str, process: RunProcess, before: Holder | None) -> None:
        self._directories.claimed(run_id, process)
        if before is not None and before.run_id != run_id and self._processes.is_same(before.process, process):
            self._directories.over(before.run_id)
        self._directories.clean(kept=run_id)

    def _check_free(self, run_id: str, process: RunProcess) -> None:
        holder = self._holder
        if holder is None or holder.run_id == run_id:
            return
        if self._processes.is_same(holder.process, process) or not self._is_live(holder):
            return
        raise Refusal(
            409,
            "E-SRV-06",
            f"the server is in use by run {holder.run_id}",
            why=f"host {holder.host}, pid {holder.process.pid}, last seen {self._idle(holder):.0f} s ago",
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
        is_alive = self._processes.is_alive(holder.process)
        if is_alive is not None:
            return is_alive
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
