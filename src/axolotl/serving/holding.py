"""What this run has on the server: its claim and the policy versions it pushed. And how to put both back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from axolotl.errors import AxolotlError, ConfigError, ServerError, SyncError
from axolotl.serving.fingerprint import differences
from axolotl.serving.handshake import Ticker, ask_info
from axolotl.serving.patience import Patience
from axolotl.serving.transport import Lost, Transport
from axolotl.serving.wire import (
    AdapterResponse,
    Body,
    ClearAdapterRequest,
    Progress,
    ServerInfo,
    SessionRequest,
    SessionResponse,
    SetAdapterRequest,
    SetWeightsRequest,
)

PROGRESS_TIMEOUT_S = 5.0
FILE_WAITS_S = (1.0, 1.5, 2.5)
"""Between the tries of a push whose files are not those announced: a network file system shows them late."""

Kind = Literal["adapter", "weights"]
Answer = TypeVar("Answer", SessionResponse, AdapterResponse)


@dataclass(frozen=True)
class Pushed:
    """A version that the server confirmed and still holds. digest: of its manifest on disk, or of what was announced of
    one that is not published: it came over NCCL."""

    kind: Kind
    version: int
    digest: str
    is_published: bool = True


class Holding:
    """One call a method, not repeated when it fails. All of them may raise `Lost`.

    A call that waits behind others on the server may take as long as the server is at work, see `_post`.

    is_guest: another process of the run has the claim and pushes.
    info: what the server said of itself last. instances: every process that has been made to serve this run.
    on_met: given what a server that came back says of itself; raises when it cannot serve this run.
    on_claimed_again: called when a server that had forgotten this run is claimed, before it gets its versions again.
    on_restored: called when it has them, before anything is asked of it. publish: writes the files of a version that
    has none, so that they can be pushed again, and returns the digest of their manifest.
    """

    def __init__(self, transport: Transport, ticker: Ticker) -> None:
        self._transport = transport
        self._ticker = ticker
        self._is_whole = True
        self.is_guest = False
        self.info: ServerInfo | None = None
        self.instances: frozenset[str] = frozenset()
        self.claimed: SessionRequest | None = None
        self.pushed: tuple[Pushed, ...] = ()
        self._coming_back: tuple[Pushed, ...] = ()
        self._has_dropped = False
        self.on_met: Callable[[ServerInfo], None] | None = None
        self.publish: Callable[[int], str] | None = None
        self.on_claimed_again: Callable[[], None] | None = None
        self.on_restored: Callable[[], None] | None = None

    @property
    def instance_id(self) -> str | None:
        return self.info.instance_id if self.info is not None else None

    def met(self, info: ServerInfo) -> None:
        """It is ready, and nothing has to be put back."""
        self.info = info
        self.instances |= {info.instance_id}

    def join(self, request: SessionRequest) -> None:
        self.claimed, self.is_guest = request, True

    def claim(self, request: SessionRequest, patience: Patience) -> SessionResponse:
        """Raises `ConfigError` for a sampling option that the engine does not support."""
        response = self._post_claim(request, patience)
        self.claimed, self.pushed, self._is_whole = request, (), True
        return response

    def push(self, kind: Kind, version: int, digest: str, patience: Patience) -> AdapterResponse:
        """Have the server load and serve a published version.

        Raises:
            SyncError: it refused it, or confirms something else.
        """
        response = self._post_version(Pushed(kind, version, digest), patience)
        # Full weights drop every version before them.
        before = [item for item in self.pushed if kind == "adapter" and item.version != version]
        kept = [item for item in before if item.version in response.loaded_versions]
        self.pushed = (*kept, Pushed(kind, version, digest))
        self._has_dropped = False
        return response

    def drop(self) -> None:
        """No version is put back from here on, and there is nothing to prove, until the next one is confirmed."""
        self.pushed, self._has_dropped = (), True

    def received(self, version: int, digest: str) -> None:
        """The server confirmed full weights that came without files."""
        self.pushed, self._has_dropped = (Pushed("weights", version, digest, is_published=False),), False

    def clear(self, patience: Patience) -> AdapterResponse:
        assert self.claimed is not None, "claim the server first"
        body = ClearAdapterRequest(run_id=self.claimed.run_id)
        response = self._post("/clear_lora_adapter/", body, AdapterResponse, patience, SyncError)
        self.pushed = ()
        return response

    def look(self, patience: Patience) -> None:
        """Tell `patience` how far the server's work counter is. Raises `Lost` as `Patience.counted`."""
        reply = self._transport.get("/progress/", PROGRESS_TIMEOUT_S)
        if reply.status_code == 401:
            raise self._transport.token_refused()
        if reply.status_code != 200:
            raise Lost(f"answers HTTP {reply.status_code}")
        progress = self._transport.parse(reply, Progress)
        if self.instance_id is not None and progress.instance_id != self.instance_id:
            raise Lost("was restarted")
        patience.counted(progress.instance_id, progress.work)

    def holds(self, version: int) -> bool:
        return any(item.version == version for item in (*self.pushed, *self._coming_back))

    def explain(self, error: AxolotlError, version: int | None = None) -> Exception:
        """The error itself, or `Lost` when it says that the server has forgotten this run.

        version: of the policy that was asked for.
        """
        if self.claimed is None:
            return error
        if error.code == "E-SRV-13" and version is not None and (self.is_guest or self.holds(version)):
            return Lost(f"says: {error.what}")
        if error.code == "E-SRV-06" and ask_info(self._transport).run_id is None:
            return Lost("has forgotten this run")
        return error

    def restore(self, patience: Patience) -> bool:
        """Make a server that is ready what it was for this run. Returns whether it had forgotten anything.

        Raises:
            ServerError: `E-SRV-07` it has another base model now, `E-SRV-06` another run has taken it.
            SyncError: a version cannot be pushed again; what `on_met` raises.
        """
        before, now = self.info, ask_info(self._transport, patience.look_s())
        if before is not None and (unequal := differences(now.fingerprint, before.fingerprint)):
            raise ServerError(
                f"the server at {self._transport.url} came back with another model: {now.fingerprint.base_model}",
                code="E-SRV-07",
                why="differing: " + "; ".join(unequal) + " (now vs before)",
                do="start it with the config that is being trained, then rerun train with --resume",
            )
        if self.is_guest and self.claimed is not None and now.run_id != self.claimed.run_id:
            raise Lost("has forgotten this run, whose first process has to claim it again")
        if self.on_met is not None:
            self.on_met(now)
        self.info = now
        if self.is_guest:
            self.met(now)
            return False
        is_forgotten = self.claimed is not None and not self._remembers(before, now, self.claimed)
        if self.claimed is not None and is_forgotten:
            self._is_whole = False
            self._post_claim(self.claimed, patience)
            self._before_versions()
            self.pushed = tuple(self._published(item) for item in self.pushed)
            for item in self.pushed:
                self._post_version(item, patience)
            if self.on_restored is not None and not self._has_dropped:
                self.on_restored()
            self._is_whole = True
        self.met(now)
        return is_forgotten

    def _published(self, item: Pushed) -> Pushed:
        if item.is_published:
            return item
        assert self.publish is not None, "who sends versions without files can publish them"
        return Pushed(item.kind, item.version, self.publish(item.version))

    def _before_versions(self) -> None:
        """What the hook pushes is its own affair, and gives way to the versions that come back after it."""
        self._coming_back, self.pushed = self.pushed, ()
        try:
            if self.on_claimed_again is not None:
                self.on_claimed_again()
        finally:
            self.pushed, self._coming_back = self._coming_back, ()

    def _remembers(self, before: ServerInfo | None, now: ServerInfo, claimed: SessionRequest) -> bool:
        is_same = before is not None and before.instance_id == now.instance_id and now.run_id == claimed.run_id
        return is_same and self._is_whole and {item.version for item in self.pushed} <= set(now.loaded_versions)

    def _post_claim(self, request: SessionRequest, patience: Patience) -> SessionResponse:
        try:
            return self._post("/session/", request, SessionResponse, patience, ServerError)
        except ServerError as error:
            if error.code == "E-SRV-19":
                raise ConfigError(error.what, code=error.code, why=error.why, do=error.do) from error
            raise

    def _post_version(self, item: Pushed, patience: Patience) -> AdapterResponse:
        waits = iter(FILE_WAITS_S)
        while True:
            try:
                response = self._post_version_once(item, patience)
                break
            except SyncError as error:
                wait = next(waits, None) if error.code == "E-SYN-02" else None
                if wait is None:
                    raise
                self._ticker.sleep(wait)
        if (response.adapter_version, response.manifest_sha256) != (item.version, item.digest):
            raise SyncError(
                f"the server confirms policy version {response.adapter_version} "
                f"({(response.manifest_sha256 or 'no files')[:12]}), pushed was {item.version} ({item.digest[:12]})",
                code="E-SYN-01",
                do="please report",
            )
        return response

    def _post_version_once(self, item: Pushed, patience: Patience) -> AdapterResponse:
        assert self.claimed is not None, "claim the server first"
        request = SetAdapterRequest if item.kind == "adapter" else SetWeightsRequest
        path = "/set_lora_adapter/" if item.kind == "adapter" else "/set_weights/"
        body = request(run_id=self.claimed.run_id, version=item.version, manifest_sha256=item.digest)
        return self._post(path, body, AdapterResponse, patience, SyncError)

    def _post(
        self, path: str, body: Body | None, answer: type[Answer], patience: Patience, error: type[AxolotlError]
    ) -> Answer:
        """The answer, however long the server is at work before it comes.

        A server does these calls one after the other, and each of them twice is the same as once. So one that is silent
        is asked again, on a new connection, as long as the counter of its work moves.

        Raises:
            Lost: nobody is there, or the counter has stood still for the timeout (`is_hung`).
        """
        patience.asked()
        while True:
            try:
                return self._transport.post(path, body, answer, patience.look_s(), self.instance_id, error)
            except Lost as lost:
                if not lost.is_silent:
                    raise
            self.look(patience)
