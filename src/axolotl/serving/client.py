"""The trainer's side of the HTTP protocol: one typed call a route.

    client.py ─► recovery.py   a lost server is a pause: again() decides, run() repeats
              │   └► patience.py   how long a call may go on: slow is not hung
              ├► holding.py    claim and pushed versions, and how to put them back
              ├► streamed.py   groups as they come; reply.py checks that they belong to the request
              ├► handshake.py  waiting until it is ready
              └► transport.py  one exchange

Every wait ends. A call repeats without harm, since seeds decide tokens; a refusal (4xx) is never repeated.
"""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType

import httpx

from axolotl.errors import AxolotlError, ServerError
from axolotl.serving import handshake
from axolotl.serving.handshake import START_HINT, Say, Ticker, ask_info
from axolotl.serving.holding import PROGRESS_TIMEOUT_S, Holding, Kind
from axolotl.serving.lease import Lease
from axolotl.serving.patience import Patience
from axolotl.serving.processes import own_namespace
from axolotl.serving.recovery import Keeper, Recovery
from axolotl.serving.reply import Answers
from axolotl.serving.streamed import read_groups
from axolotl.serving.transport import Lost, Transport, Waiting, is_loopback
from axolotl.serving.weight_link import WeightLink
from axolotl.serving.wire import (
    AdapterResponse,
    Fingerprint,
    GenerateRequest,
    GenerateResponse,
    Group,
    Progress,
    Sampling,
    ServerInfo,
    SessionRequest,
    SessionResponse,
)

__all__ = ["Keeper", "ServerClient", "is_loopback"]

RELEASE_TIMEOUT_S = 10.0


class ServerClient:
    """Synchronous; used from any thread, and when the server is lost one of them recovers for all.

    Args:
        url: `http://host:port`.
        sync_dir: where the server left its token, unless `AXOLOTL_SERVER_TOKEN` gives it.
        timeout_s: the longest time without contact or progress.
        keeper: who can start the server again; None when that is a person.
        waiting: entered on the calling thread while nothing happens but waiting for the server; what it raises, or a
            signal's handler inside it, ends the call.
        say: gets a line when a pause begins, every 30 s, and when it ends.
        transport, sleep, clock: for tests.
    """

    def __init__(
        self,
        url: str,
        sync_dir: Path,
        timeout_s: float,
        *,
        keeper: Keeper | None = None,
        say: Say = handshake.silent,
        waiting: Waiting = nullcontext,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._say = say
        self._ticker = Ticker(_sleep_in(waiting, sleep), clock)
        self._transport = Transport(url, sync_dir, transport, waiting)
        self._holding = Holding(self._transport, self._ticker)
        self._recovery = Recovery(self._transport, self._holding, timeout_s, self._ticker, say, keeper)
        self._lease: Lease | None = None
        self._lease_s = math.inf

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._transport.url

    @property
    def info(self) -> ServerInfo:
        """What the server said of itself last: in `wait_ready`, or when it came back."""
        assert self._holding.info is not None, "call wait_ready first"
        return self._holding.info

    @property
    def instances(self) -> frozenset[str]:
        """Every process that was ready for this run, and was given and proved its versions: no other is believed."""
        return self._holding.instances

    @property
    def on_recovered(self) -> Callable[[], None] | None:
        """Called when a server that had forgotten this run has been claimed and given its versions again, before
        anything else is asked of it, on the thread that noticed. It may use this client; what it raises ends the run.
        """
        return self._holding.on_restored

    @on_recovered.setter
    def on_recovered(self, hook: Callable[[], None] | None) -> None:
        self._holding.on_restored = hook

    @property
    def on_claimed_again(self) -> Callable[[], None] | None:
        """Called before `on_recovered`, while the server that came back holds nothing but the base model. As that one,
        it may use this client; what it pushes is dropped once the run's versions are back."""
        return self._holding.on_claimed_again

    @on_claimed_again.setter
    def on_claimed_again(self, hook: Callable[[], None] | None) -> None:
        self._holding.on_claimed_again = hook

    def require(self, check: Callable[[ServerInfo], None]) -> None:
        """`check` raises when this run cannot be served by such a server: it is called now, and for every one that
        comes back, before it is given anything."""
        check(self.info)
        self._holding.on_met = check

    def close(self) -> None:
        self._transport.close()

    def wait_ready(self, on_wait: Say | None = None, *, check: Callable[[], None] = lambda: None) -> ServerInfo:
        """Return once the server can generate.

        A server that says that it is loading is waited for as long as it says so. Any other wait ends `timeout_s` after
        it began, or after the server last said so.

        Args:
            on_wait: called with one line when waiting begins and every 30 s, with what the server is doing.
            check: called after every unsuccessful poll; what it raises ends the wait.

        Raises:
            ServerError: `E-SRV-01` nobody answers; `E-SRV-02` something answers that is no server of ours or speaks
                another protocol; `E-SRV-03` it refuses the token; `E-SRV-18` it failed to load, at once.
        """
        handshake.wait_ready(self._transport, self._timeout_s, self._ticker, on_wait or self._say, check)
        try:
            self._holding.met(ask_info(self._transport))
        except Lost as lost:
            raise ServerError(
                f"the server at {self.url} was there and is gone",
                code="E-SRV-01",
                why=f"it {lost.reason}",
                do=START_HINT,
            ) from lost
        return self.info

    def claim(self, run_id: str, fingerprint: Fingerprint, sampling: Sampling | None = None) -> SessionResponse:
        """Make the server work for this run: adapters, weights and caches of earlier runs are dropped.

        Args:
            sampling: what the run will sample with.

        Raises:
            ServerError: `E-SRV-06` another live run holds it, `E-SRV-07` its model is not the one being trained.
            ConfigError: `E-SRV-19` the engine does not support an option of `sampling`.
        """
        request = SessionRequest(
            run_id=run_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            namespace=own_namespace(),
            fingerprint=fingerprint,
            sampling=sampling,
        )
        response = self._recovery.run("claim", lambda patience: self._holding.claim(request, patience))
        self._lease_s = response.lease_s
        return response

    def join(self, run_id: str, fingerprint: Fingerprint) -> None:
        """Work for a run whose claim another process keeps: nothing is claimed, pushed or released from here.

        A server that was lost is waited for until that process has given it the claim and the versions again.
        """
        self._holding.join(
            SessionRequest(
                run_id=run_id,
                host=socket.gethostname(),
                pid=os.getpid(),
                namespace=own_namespace(),
                fingerprint=fingerprint,
            )
        )

    @contextmanager
    def renewing(self, *, for_guests: bool = False) -> Iterator[None]:
        """Keep the claim alive during the block. When another run has taken the server all the same, the next call
        raises its `E-SRV-06`.

        Args:
            for_guests: claim a server that has forgotten the run without a call that needs it: others may wait for that
                while this process waits for them.
        """
        assert self._holding.claimed is not None, "claim the server first"
        on_forgotten = self._claim_again if for_guests else lambda: None
        with Lease(self._transport.another(), self._holding.claimed, self._lease_s, on_forgotten) as lease:
            self._lease = lease
            try:
                yield
            finally:
                self._lease = None

    def _claim_again(self) -> None:
        def ask(patience: Patience) -> None:
            if ask_info(self._transport).run_id is None:
                raise Lost("has forgotten this run")

        self._recovery.run("claim", ask)

    def release(self) -> None:
        """Give the server back. Does nothing without a claim; a server that is gone is released already."""
        claimed, self._holding.claimed = self._holding.claimed, None
        if claimed is None or self._holding.is_guest:
            return
        body = claimed.model_copy(update={"action": "release", "sampling": None})
        with suppress(Lost, AxolotlError):
            self._transport.post("/session/", body, SessionResponse, RELEASE_TIMEOUT_S, None)

    def generate(
        self, request: GenerateRequest, on_group: Callable[[Group], None] = lambda group: None
    ) -> GenerateResponse:
        """Completions of `request`, in the order of its prompts; asked for by the run of the claim, if there is one.

        A server that is lost meanwhile is waited for, and asked again for what is missing. Each group names the process
        that made it.

        Args:
            on_group: gets each group once, as soon as it is finished and checked. It may take its time.

        Raises:
            ServerError: `E-SRV-04` the server did not come back, `E-SRV-05` it makes no progress, within the timeout;
                `E-SRV-09` an answer that does not fit the request; `E-SRV-06` another run has taken the server; the
                server's own code for a request it refuses.
        """
        answers = self._answers(request)
        with closing(self._stream(answers)) as finished:
            for group in finished:
                on_group(group)
        assert answers.adapter_version is not None
        return GenerateResponse(
            request_id=request.request_id,
            instance_id=self.info.instance_id,
            adapter_version=answers.adapter_version,
            groups=answers.groups,
        )

    def stream(self, request: GenerateRequest) -> Generator[Group, None, None]:
        """`generate`, as an iterator of groups in the order in which they finish. Close it to abort what is left."""
        return self._stream(self._answers(request))

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        temperature: float,
        adapter_version: int,
    ) -> list[list[float]]:
        """Log-probs of `tokens[i]` after `prompts[i]` under `adapter_version`; NaN where not finite."""
        request = GenerateRequest(
            request_id=f"score-{uuid.uuid4().hex}",
            adapter_version=adapter_version,
            prompts=[list(prompt) for prompt in prompts],
            sampling=Sampling(max_tokens=1, temperature=temperature),
            score_ids=[list(ids) for ids in tokens],
        )
        response = self.generate(request)
        return [
            [math.nan if value is None else value for value in group.completions[0].logprobs]
            for group in response.groups
        ]

    def set_adapter(self, version: int, manifest_sha256: str) -> AdapterResponse:
        """Have the server load and serve a published version of this run's adapter.

        Raises:
            SyncError: the server refused it, or confirms something else.
        """
        self._check_lease()
        return self._push("set_lora_adapter", "adapter", version, manifest_sha256)

    def set_weights(self, version: int, manifest_sha256: str) -> AdapterResponse:
        """Have the server replace its weights by a published version of this run's.

        Raises:
            SyncError: the server refused it, or confirms something else.
        """
        self._check_lease()
        return self._push("set_weights", "weights", version, manifest_sha256)

    def weight_link(self, publish: Callable[[int], str]) -> WeightLink:
        """The calls of a transfer over NCCL, on connections of their own.

        Args:
            publish: as `Holding.publish`; called from any thread, when a server that is back lacks a version.
        """
        self._holding.publish = publish
        return WeightLink(self._transport.another(), self._holding, self._timeout_s, self._say)

    def undisturbed(self) -> AbstractContextManager[None]:
        """A block of calls that belong together: it begins when no other thread puts back what a restarted server has
        lost, and none does while it runs."""
        return self._recovery.undisturbed()

    def claim_again(self) -> None:
        """Have the server drop whatever this run has pushed, when it is not known how far a push got."""
        claimed = self._holding.claimed
        assert claimed is not None, "claim the server first"
        self._holding.drop()
        self._recovery.run("claim", lambda patience: self._holding.claim(claimed, patience))

    def clear_adapter(self) -> AdapterResponse:
        """Have the server go back to the base model."""
        self._check_lease()
        return self._recovery.run("clear_lora_adapter", self._holding.clear)

    def progress(self) -> Progress:
        """The server's counters, now. Asks once.

        Raises:
            ServerError: `E-SRV-04` nobody answers.
        """
        try:
            reply = self._transport.get("/progress/", PROGRESS_TIMEOUT_S)
        except Lost as lost:
            raise ServerError(f"the server at {self.url} {lost.reason}", code="E-SRV-04", do=START_HINT) from lost
        if reply.status_code == 401:
            raise self._transport.token_refused()
        return self._transport.parse(reply, Progress)

    def _answers(self, request: GenerateRequest) -> Answers:
        claimed = self._holding.claimed
        run_id = claimed.run_id if claimed is not None else request.run_id
        vocab_size = self.info.fingerprint.summary.get("vocab_size")
        return Answers(
            request.model_copy(update={"run_id": run_id, "stream": True}),
            vocab_size if isinstance(vocab_size, int) else None,
        )

    def _stream(self, answers: Answers) -> Generator[Group, None, None]:
        self._check_lease()
        patience = self._recovery.patience("generate")
        while not answers.is_complete:
            self._recovery.begin(patience)
            try:
                yield from self._attempt(answers, patience)
            except Lost as lost:
                if not answers.is_complete:
                    self._recovery.again(lost, patience)
        self._recovery.served(patience)

    def _push(self, doing: str, kind: Kind, version: int, digest: str) -> AdapterResponse:
        return self._recovery.run(doing, lambda patience: self._holding.push(kind, version, digest, patience))

    def _attempt(self, answers: Answers, patience: Patience) -> Iterator[Group]:
        """The groups of one exchange."""
        request = answers.missing()
        try:
            with self._transport.lines("/generate/", request, patience.contact_s(), patience.instance_id) as lines:
                yield from read_groups(lines, answers, patience)
        except AxolotlError as error:
            if (meant := self._holding.explain(error, request.adapter_version)) is not error:
                raise meant from error
            raise

    def _check_lease(self) -> None:
        if self._lease is not None and self._lease.problem is not None:
            raise self._lease.problem


def _sleep_in(waiting: Waiting, sleep: Callable[[float], None]) -> Callable[[float], None]:
    def wait(seconds: float) -> None:
        with waiting():
            sleep(seconds)

    return wait
