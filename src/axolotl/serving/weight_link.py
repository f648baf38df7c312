"""The trainer's side of a transfer over NCCL, as far as it is HTTP. What moves the tensors is elsewhere."""

from __future__ import annotations

from typing import Literal

from axolotl.errors import SyncError
from axolotl.serving.handshake import Say
from axolotl.serving.holding import Holding
from axolotl.serving.transport import Transport
from axolotl.serving.wire import AdapterResponse, LinkRequest, LinkResponse, TransferRequest


class WeightLink:
    """One exchange a method, never repeated: the other half of each is a collective that cannot be repeated by HTTP.
    All of them may raise `Lost`, and `SyncError` when the server refuses.

    `link` and `receive` block until the trainer has done its half, so they are for a thread beside the one that is in
    NCCL; they touch nothing but HTTP. The others belong to the main thread.

    say: prints a line for the user.
    """

    def __init__(self, transport: Transport, holding: Holding, timeout_s: float, say: Say) -> None:
        self._transport = transport
        self._holding = holding
        self._timeout_s = timeout_s
        self.say = say

    @property
    def run_id(self) -> str:
        assert self._holding.claimed is not None, "claim the server first"
        return self._holding.claimed.run_id

    @property
    def timeout_s(self) -> float:
        """Longest that `link` and `receive` take."""
        return self._timeout_s

    def link(self, unique_id: str) -> None:
        """Return when all of the server's workers are in the group `unique_id` (base64)."""
        self._post_link(unique_id, "join")

    def leave(self, unique_id: str) -> None:
        """Tell the server that this side will not come, or sends no more: an engine that waits for it is given up."""
        self._post_link(unique_id, "leave")

    def check(self, transfer: TransferRequest) -> None:
        """Return when the server could receive it now. Raises `E-SYN-13` when it is not linked."""
        self._post(transfer, "check")

    def receive(self, transfer: TransferRequest) -> AdapterResponse:
        """Return when the server has received and serves it."""
        answer = self._post(transfer, "receive")
        if (answer.adapter_version, answer.manifest_sha256) != (transfer.version, transfer.sha256):
            raise SyncError(
                f"the server confirms policy version {answer.adapter_version} "
                f"({(answer.manifest_sha256 or 'nothing')[:12]}), sent was {transfer.version} ({transfer.sha256[:12]})",
                code="E-SYN-01",
                do="please report",
            )
        return answer

    def forget(self) -> None:
        """Before a transfer: no version before it is put back on a server that comes back."""
        self._holding.drop()

    def confirm(self, transfer: TransferRequest) -> None:
        """After a transfer: a server that comes back is given this version."""
        self._holding.received(transfer.version, transfer.sha256)

    def _post_link(self, unique_id: str, action: Literal["join", "leave"]) -> None:
        request = LinkRequest(run_id=self.run_id, unique_id=unique_id, action=action)
        self._transport.post(
            "/link_weights/", request, LinkResponse, self._timeout_s, self._holding.instance_id, SyncError
        )

    def _post(self, transfer: TransferRequest, action: str) -> AdapterResponse:
        body = transfer.model_copy(update={"action": action})
        return self._transport.post(
            "/receive_weights/", body, AdapterResponse, self._timeout_s, self._holding.instance_id, SyncError
        )
