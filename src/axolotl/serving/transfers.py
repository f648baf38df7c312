"""Full weights over NCCL, from a request to the engine's workers. Not every engine has them.

link     once a server process: the workers join the trainer's group
check    everything that can be refused is refused here, while nobody waits for anybody
receive  from here on trainer and workers wait for each other inside NCCL, where nothing can be refused any more;
         what breaks it off (the trainer leaves or is gone, an error) ends the engine, as a failed reload does
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from axolotl.serving.engines.protocol import Engine, EngineRejects, WeightReceiver
from axolotl.serving.refusals import Refusal
from axolotl.serving.versions import PolicyVersions
from axolotl.serving.wire import AdapterResponse, TransferRequest

T = TypeVar("T")


class Transfers:
    """Event loop only. One link or transfer at a time. The id of a group says which link a `leave` is about."""

    def __init__(self, engine: Engine, versions: PolicyVersions) -> None:
        self._engine = engine
        self._versions = versions
        self._running: asyncio.Future[Any] | None = None
        self._group = self._left = ""

    async def link(self, unique_id: str) -> int:
        """Join the trainer's group of NCCL; returns how many ranks it has.

        Raises:
            Refusal: 422 `E-SYN-13` the engine takes files only, `E-SYN-14` its workers could not join; 503 `E-SRV-23`
                it was cancelled.
        """
        receiver = self._receiver()
        if unique_id == self._left:
            raise _given_up()
        self._group = unique_id
        try:
            await self._until_cancelled(receiver.link(unique_id))
        except EngineRejects as error:
            raise Refusal(
                422, "E-SYN-14", "the engine's workers could not join the trainer over NCCL", why=str(error)
            ) from error
        return 1 + len(receiver.ranks)

    def check(self, request: TransferRequest) -> None:
        """Raises a `Refusal`: 409 the version is held already, 422 the engine cannot receive it."""
        receiver = self._receiver()
        self._versions.check_new(request.version)
        if self._group == self._left or not receiver.is_linked:
            raise Refusal(409, "E-SYN-13", "there is no link over NCCL to this server", do="link again")
        try:
            receiver.check(request.tensors)
        except EngineRejects as error:
            raise Refusal(422, "E-SYN-01", "the engine refused the weights", why=str(error)) from error

    async def receive(self, request: TransferRequest) -> AdapterResponse:
        """Raises as `check`, and 503 `E-SRV-23` when it was cancelled; what the engine raises passes through."""
        self.check(request)
        receiver = self._receiver()
        return await self._until_cancelled(
            self._versions.receive_weights(
                request.version, request.sha256, lambda: receiver.receive(request.version, request.tensors)
            )
        )

    def leave(self, unique_id: str) -> None:
        """The trainer's half of what goes on in this group has failed, and the engine's would wait for it for ever: end
        it, also when its request comes only now (the trainer's two threads race)."""
        self._left = unique_id
        if self._running is not None and self._group == unique_id:
            self._running.cancel()

    async def _until_cancelled(self, work: Coroutine[Any, Any, T]) -> T:
        if self._running is not None:
            work.close()
            raise Refusal(409, "E-SYN-13", "another link or transfer is under way")
        task = asyncio.ensure_future(work)
        self._running = task
        try:
            await asyncio.wait({task})
        finally:
            self._running = None
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise _given_up()
        return task.result()

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


def _given_up() -> Refusal:
    return Refusal(503, "E-SRV-23", "the trainer gave up the link or transfer", why="it could not go on")
