"""Full weights over NCCL, from a request to the engine's workers. Not every engine has them.

link     once a server process: the workers join the trainer's group
check    everything that can be refused is refused here, while nobody waits for anybody
receive  from here on trainer and workers wait for each other inside NCCL, where nothing can be refused any more;
         what breaks it off (the trainer leaves, its cancel, an error) ends the engine, as a failed reload does
"""

from __future__ import annotations

import asyncio

from axolotl.serving.engines.protocol import Engine, EngineRejects, WeightReceiver
from axolotl.serving.refusals import Refusal
from axolotl.serving.versions import PolicyVersions
from axolotl.serving.wire import AdapterResponse, TransferRequest


class Transfers:
    """Event loop only."""

    def __init__(self, engine: Engine, versions: PolicyVersions) -> None:
        self._engine = engine
        self._versions = versions
        self._receiving: asyncio.Task[AdapterResponse] | None = None
        self._is_cancelled = False

    async def link(self, unique_id: str) -> int:
        """Join the trainer's group of NCCL; returns how many ranks it has.

        Raises:
            Refusal: 422 `E-SYN-13` the engine takes files only, `E-SYN-14` its workers could not join.
        """
        receiver = self._receiver()
        try:
            await receiver.link(unique_id)
        except EngineRejects as error:
            raise Refusal(
                422, "E-SYN-14", "the engine's workers could not join the trainer over NCCL", why=str(error)
            ) from error
        self._is_cancelled = False
        return 1 + len(receiver.ranks)

    def check(self, request: TransferRequest) -> None:
        """Raises a `Refusal`: 409 the version is held already, 422 the engine cannot receive it."""
        receiver = self._receiver()
        self._versions.check_new(request.version)
        if self._is_cancelled or not receiver.is_linked:
            raise Refusal(409, "E-SYN-13", "there is no link over NCCL to this server", do="link again")
        try:
            receiver.check(request.tensors)
        except EngineRejects as error:
            raise Refusal(422, "E-SYN-01", "the engine refused the weights", why=str(error)) from error

    async def receive(self, request: TransferRequest) -> AdapterResponse:
        """Raises as `check`, and 503 `E-SRV-23` when it was cancelled; what the engine raises passes through."""
        if self._receiving is not None:
            raise Refusal(409, "E-SYN-13", "another version is being received")
        self.check(request)
        receiver = self._receiver()
        work = self._versions.receive_weights(
            request.version, request.sha256, lambda: receiver.receive(request.version, request.tensors)
        )
        task = self._receiving = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task})
        finally:
            self._receiving = None
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise Refusal(503, "E-SRV-23", "the trainer gave up the transfer", why="it could not go on sending")
        return task.result()

    def cancel(self) -> None:
        """End what is being received, or would be as soon as its request comes: the trainer's two threads race."""
        self._is_cancelled = True
        if self._receiving is not None:
            self._receiving.cancel()

    def _receiver(self) -> WeightReceiver:
        if self._engine.receiver is None:
            raise Refusal(
                422,
                "E-SYN-13",
                f"the {self._engine.name} engine takes full weights as files only",
                why="NCCL needs vllm.engine: vllm on a GPU, started with a config that sends full weights",
                do="set trl.weight_sync: files",
            )
        return self._engine.receiver
