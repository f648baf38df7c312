"""What this run has on the server: its claim and the policy versions it pushed. And how to put both back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from axolotl.errors import AxolotlError, ConfigError, ServerError, SyncError
from axolotl.serving.fingerprint import differences
from axolotl.serving.handshake import Ticker, ask_info
from axolotl.serving.transport import Lost, Transport
from axolotl.serving.wire import (
    AdapterResponse,
    ClearAdapterRequest,
    ServerInfo,
    SessionRequest,
    SessionResponse,
    SetAdapterRequest,
    SetWeightsRequest,
)

CONTROL_TIMEOUT_S = 120.0
FILE_WAITS_S = (1.0, 1.5, 2.5)
"""Between the tries of a push whose files are not those announced: a network file system shows them late."""

Kind = Literal["adapter", "weights"]


@dataclass(frozen=True)
class Pushed:
    """A version that the server confirmed and still holds. digest: of its manifest on disk."""

    kind: Kind
    version: int
    digest: str


class Holding:
    """One exchange a method, without repeating it. All of them may raise `Lost`.

    info: what the server said of itself last. on_claimed_again: called when a server that had forgotten this run is
    claimed, before it gets its versions again. on_restored: called when it has them, before anything is asked of it.
    """

    def __init__(self, transport: Transport, timeout_s: float, ticker: Ticker) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._ticker = ticker
        self._is_whole = True
        self.info: ServerInfo | None = None
        self.claimed: SessionRequest | None = None
        self.pushed: tuple[Pushed, ...] = ()
        self.on_claimed_again: Callable[[], None] | None = None
        self.on_restored: Callable[[], None] | None = None

    @property
    def instance_id(self) -> str | None:
        return self.info.instance_id if self.info is not None else None

    def claim(self, request: SessionRequest) -> SessionResponse:
        """Raises `ConfigError` for a sampling option that the engine does not support."""
        response = self._post_claim(request)
        self.claimed, self.pushed, self._is_whole = request, (), True
        return response

    def push(self, kind: Kind, version: int, digest: str) -> AdapterResponse:
        """Have the server load and serve a published version.

        Raises:
            SyncError: it refused it, or confirms something else.
        """
        response = self._post_version(Pushed(kind, version, digest))
        # Full weights drop every version before them.
        before = [item for item in self.pushed if kind == "adapter" and item.version != version]
        kept = [item for item in before if item.version in response.loaded_versions]
        self.pushed = (*kept, Pushed(kind, version, digest))
        return response

    def clear(self) -> AdapterResponse:
        assert self.claimed is not None, "claim the server first"
        body = ClearAdapterRequest(run_id=self.claimed.run_id)
        response = self._transport.post(
            "/clear_lora_adapter/", body, AdapterResponse, self._control_s(), self.instance_id, SyncError
        )
        self.pushed = ()
        return response

    def holds(self, version: int) -> bool:
        return any(item.version == version for item in self.pushed)

    def explain(self, error: AxolotlError, version: int | None = None) -> Exception:
        """The error itself, or `Lost` when it says that the server has forgotten this run.

        version: of the policy that was asked for.
        """
        if self.claimed is None:
            return error
        if error.code == "E-SRV-13" and version is not None and self.holds(version):
            return Lost(f"says: {error.what}")
        if error.code == "E-SRV-06" and ask_info(self._transport).run_id is None:
            return Lost("has forgotten this run")
        return error

    def restore(self) -> bool:
        """Make a server that is ready what it was for this run. Returns whether it had forgotten anything.

        Raises:
            ServerError: `E-SRV-07` it has another base model now, `E-SRV-06` another run has taken it.
            SyncError: a version cannot be pushed again.
        """
        before, now = self.info, ask_info(self._transport)
        if before is not None and (unequal := differences(now.fingerprint, before.fingerprint)):
            raise ServerError(
                f"the server at {self._transport.url} came back with another model: {now.fingerprint.base_model}",
                code="E-SRV-07",
                why="differing: " + "; ".join(unequal) + " (now vs before)",
                do="start it with the config that is being trained, then rerun train with --resume",
            )
        self.info = now
        if self.claimed is None or self._remembers(before, now, self.claimed):
            return False
        self._is_whole = False
        self._post_claim(self.claimed)
        self._before_versions()
        for item in self.pushed:
            self._post_version(item)
        if self.on_restored is not None:
            self.on_restored()
        self._is_whole = True
        return True

    def _before_versions(self) -> None:
        """What the hook pushes is its own affair, and gives way to the versions that come back after it."""
        pushed, self.pushed = self.pushed, ()
        try:
            if self.on_claimed_again is not None:
                self.on_claimed_again()
        finally:
            self.pushed = pushed

    def _remembers(self, before: ServerInfo | None, now: ServerInfo, claimed: SessionRequest) -> bool:
        is_same = before is not None and before.instance_id == now.instance_id and now.run_id == claimed.run_id
        return is_same and self._is_whole and {item.version for item in self.pushed} <= set(now.loaded_versions)

    def _post_claim(self, request: SessionRequest) -> SessionResponse:
        try:
            return self._transport.post("/session/", request, SessionResponse, self._control_s(), self.instance_id)
        except ServerError as error:
            if error.code == "E-SRV-19":
                raise ConfigError(error.what, code=error.code, why=error.why, do=error.do) from error
            raise

    def _post_version(self, item: Pushed) -> AdapterResponse:
        waits = iter(FILE_WAITS_S)
        while True:
            try:
                response = self._post_version_once(item)
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

    def _post_version_once(self, item: Pushed) -> AdapterResponse:
        assert self.claimed is not None, "claim the server first"
        request = SetAdapterRequest if item.kind == "adapter" else SetWeightsRequest
        path = "/set_lora_adapter/" if item.kind == "adapter" else "/set_weights/"
        read_s = self._control_s() if item.kind == "adapter" else self._timeout_s
        body = request(run_id=self.claimed.run_id, version=item.version, manifest_sha256=item.digest)
        return self._transport.post(path, body, AdapterResponse, read_s, self.instance_id, SyncError)

    def _control_s(self) -> float:
        return min(CONTROL_TIMEOUT_S, self._timeout_s)
