"""Full weights over NCCL at the server: what is refused before anybody waits, and what ends the engine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from axolotl.errors import ServerError
from axolotl.serving.app import ServerState, build_app
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import ErrorBody, ServerInfo
from tests.fakes.engine import FAKE_FINGERPRINT, FakeEngine
from tests.fakes.nccl import Communicator, FakeNccl
from tests.fakes.receiver import FakeReceiver
from tests.support.adapters import publish_fake_weights

RUN = "run-0123456789ab"
HEADERS = {"authorization": "Bearer secret"}
UNIQUE_ID = bytes(range(128))
LAYOUT = [{"name": "a", "dtype": "float32", "shape": [2]}, {"name": "b", "dtype": "float32", "shape": []}]
TENSORS = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
CLAIM = {"run_id": RUN, "host": "elsewhere", "pid": 1, "fingerprint": FAKE_FINGERPRINT.model_dump()}


class Trainer:
    """Its HTTP, and its end of the link once `link` was called."""

    def __init__(self, client: httpx.AsyncClient, state: ServerState, nccl: FakeNccl, receiver: FakeReceiver) -> None:
        self.client = client
        self.state = state
        self.nccl = nccl
        self.receiver = receiver
        self.group: Communicator | None = None
        self.unique_id = b""

    async def link(self) -> dict[str, Any]:
        unique_id = self.unique_id = self.nccl.new_id()
        joining = asyncio.to_thread(self.nccl.join_trainer, unique_id, 0, 2, 0)
        self.group, reply = await asyncio.gather(joining, self.post("/link_weights/", unique_id=encoded(unique_id)))
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def transfer(self, action: str, version: int = 1, **changed: Any) -> httpx.Response:
        body = {"version": version, "sha256": "a" * 64, "tensors": LAYOUT, "action": action, **changed}
        return await self.post("/receive_weights/", **body)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"run_id": RUN, **body})

    async def leave(self, unique_id: bytes | None = None) -> None:
        group = encoded(unique_id if unique_id is not None else self.unique_id)
        reply = await self.post("/link_weights/", unique_id=group, action="leave")
        assert reply.json() == {"instance_id": "i-1", "num_ranks": 0}

    async def send(self) -> None:
        for tensor in TENSORS:
            assert self.group is not None
            await asyncio.to_thread(self.group.broadcast, tensor, 0)


def encoded(unique_id: bytes) -> str:
    return base64.b64encode(unique_id).decode()


def with_trainer(sync_dir: Path, body: Callable[[Trainer], Awaitable[None]]) -> None:
    async def run() -> None:
        async with trainer(sync_dir) as one, asyncio.timeout(20):
            await body(one)

    asyncio.run(run())


@asynccontextmanager
async def trainer(sync_dir: Path) -> AsyncIterator[Trainer]:
    nccl = FakeNccl()
    receiver = FakeReceiver(nccl)
    state = ServerState(instance_id="i-1", token="secret", sync_dir=sync_dir, max_held=3)
    state.ready(FakeEngine(receiver=receiver))
    transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=HEADERS) as client:
        assert (await client.post("/session/", json=CLAIM)).status_code == 200
        try:
            yield Trainer(client, state, nccl, receiver)
        finally:
            nccl.leave_waiting()
            receiver.unlink()


def outcome(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, ErrorBody.model_validate_json(reply.content).code


def test_weights_arrive_as_they_were_sent_and_are_the_only_version(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        assert await one.link() == {"instance_id": "i-1", "num_ranks": 2}
        assert (await one.transfer("check")).json()["adapter_version"] == 0, "a check changes nothing"
        reply, _ = await asyncio.gather(one.transfer("receive"), one.send())
        assert reply.json() == {
            "instance_id": "i-1",
            "adapter_version": 1,
            "manifest_sha256": "a" * 64,
            "num_modules": 2,
            "loaded_versions": [1],
        }
        received = one.receiver.received[1]
        assert received["a"].tolist() == [1.0, 2.0] and received["b"].item() == 3.0
        await asyncio.gather(one.transfer("receive", 2), one.send())
        info = ServerInfo.model_validate_json((await one.client.get("/server_info/")).content)
        assert (info.adapter_version, info.loaded_versions) == (2, [2])
        assert (info.weight_transports, info.weight_ranks) == (["files", "nccl"], ["GPU-1111"])

    with_trainer(tmp_path, body)


@pytest.mark.parametrize("action", ["check", "receive"])
def test_everything_that_can_be_refused_is_refused_before_the_trainer_sends(tmp_path: Path, action: str) -> None:
    async def body(one: Trainer) -> None:
        assert outcome(await one.transfer(action)) == (409, "E-SYN-13"), "no link"
        await one.link()
        one.receiver.refusal = EngineRejects("1 weights are not the model's: c")
        assert outcome(await one.transfer(action)) == (422, "E-SYN-01")
        one.receiver.refusal = None
        assert outcome(await one.transfer(action, run_id="run-of-others")) == (409, "E-SRV-06")
        digest = publish_fake_weights(tmp_path, RUN, 1)
        loaded = await one.client.post("/set_weights/", json={"run_id": RUN, "version": 1, "manifest_sha256": digest})
        assert loaded.status_code == 200, loaded.text
        assert outcome(await one.transfer(action)) == (409, "E-SYN-07"), "a version comes once"
        assert one.state.health.status == "ok" and not one.receiver.broken.is_set()

    with_trainer(tmp_path, body)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("/link_weights/", "unique_id", "A" * 172),
        ("/link_weights/", "unique_id", "A" * 170 + "-="),
        ("/link_weights/", "unique_id", ""),
        ("/link_weights/", "unique_id", None),
        ("/link_weights/", "action", "stay"),
        ("/link_weights/", "master_address", "10.0.0.1"),
        ("/receive_weights/", "version", 0),
        ("/receive_weights/", "sha256", "x"),
        ("/receive_weights/", "tensors", []),
        ("/receive_weights/", "action", "cancel"),
        ("/receive_weights/", "tensors", [{**LAYOUT[0], "dtype": "int64"}]),
        ("/receive_weights/", "tensors", [{**LAYOUT[0], "shape": [-1]}]),
        ("/receive_weights/", "tensors", [{**LAYOUT[0], "shape": [1] * 9}]),
        ("/receive_weights/", "tensors", [{**LAYOUT[0], "name": "a b"}]),
    ],
)
def test_a_body_that_is_not_of_the_protocol_reaches_no_engine(tmp_path: Path, path: str, key: str, value: Any) -> None:
    async def body(one: Trainer) -> None:
        good: dict[str, Any] = (
            {"unique_id": encoded(UNIQUE_ID)}
            if path == "/link_weights/"
            else {"version": 1, "sha256": "a" * 64, "tensors": LAYOUT, "action": "receive"}
        )
        assert outcome(await one.post(path, **{**good, key: value})) == (422, "E-SRV-16")
        assert one.receiver.num_links == 0 and not one.receiver.started.is_set()

    with_trainer(tmp_path, body)


def test_an_engine_that_takes_files_says_so(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        one.state.ready(FakeEngine())
        await one.client.post("/session/", json=CLAIM)
        for reply in (
            await one.post("/link_weights/", unique_id=encoded(UNIQUE_ID)),
            await one.transfer("check"),
            await one.transfer("receive"),
        ):
            assert outcome(reply) == (422, "E-SYN-13") and "as files only" in reply.text

    with_trainer(tmp_path, body)


def test_workers_that_cannot_join_leave_the_server_as_it_was(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        one.receiver.link_fault = EngineRejects("NCCL error: invalid usage")
        reply = await one.post("/link_weights/", unique_id=encoded(UNIQUE_ID))
        assert outcome(reply) == (422, "E-SYN-14") and "invalid usage" in reply.text
        assert (await one.client.get("/health/")).status_code == 200

    with_trainer(tmp_path, body)


def test_workers_that_wait_for_a_trainer_that_could_not_join_are_given_up(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        joining = asyncio.ensure_future(one.post("/link_weights/", unique_id=encoded(UNIQUE_ID)))
        await one.receiver.linking.wait()
        assert outcome(await one.post("/link_weights/", unique_id=encoded(UNIQUE_ID))) == (409, "E-SYN-13")
        await one.leave(bytes(128))
        assert not joining.done(), "it was another group"
        await one.leave(UNIQUE_ID)
        assert outcome(await joining) == (503, "E-SRV-23")
        assert one.receiver.broken.is_set()

    with_trainer(tmp_path, body)


def test_a_link_of_which_nothing_is_known_breaks_the_server(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        one.receiver.link_fault = ServerError("vLLM did not answer within 300 s", code="E-SRV-05")
        assert (await one.post("/link_weights/", unique_id=encoded(UNIQUE_ID))).status_code == 500
        assert one.state.broken.is_set() and "300 s" in one.state.health.phase

    with_trainer(tmp_path, body)


def test_a_failed_transfer_breaks_the_server_as_a_failed_reload_does(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        await one.link()
        one.receiver.breaks_after = 1
        sending = asyncio.ensure_future(one.send())
        reply = await one.transfer("receive")
        assert outcome(reply) == (500, "E-SRV-23")
        assert one.group is not None
        one.group.destroy()
        await sending
        assert one.state.broken.is_set()
        assert outcome(await one.transfer("check", 2)) == (503, "E-SRV-20")

    with_trainer(tmp_path, body)


def test_what_the_trainer_cannot_go_on_with_is_given_up(tmp_path: Path) -> None:
    """It sent the first tensor and cannot go on; the worker waits inside NCCL, where nothing reaches it."""

    async def body(one: Trainer) -> None:
        await one.link()
        receiving = asyncio.ensure_future(one.transfer("receive"))
        await one.receiver.started.wait()
        assert outcome(await one.transfer("receive", 2)) == (409, "E-SYN-13"), "one at a time"
        await one.leave()
        assert outcome(await receiving) == (503, "E-SRV-23")
        assert one.receiver.broken.is_set(), "the engine is told"
        assert one.state.serving is not None
        reply = await one.client.post("/generate/", json=generate(0))
        assert outcome(reply) == (409, "E-SRV-13"), "nobody knows which weights they are"

    with_trainer(tmp_path, body)


def test_who_left_before_the_request_came_is_not_waited_for(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        await one.leave(UNIQUE_ID)
        reply = await one.post("/link_weights/", unique_id=encoded(UNIQUE_ID))
        assert outcome(reply) == (503, "E-SRV-23") and not one.receiver.linking.is_set()
        await one.link()
        await one.leave()
        assert outcome(await one.transfer("receive")) == (409, "E-SYN-13")
        assert not one.receiver.broken.is_set(), "nothing had begun"
        await one.link()
        assert (await one.transfer("check")).status_code == 200

    with_trainer(tmp_path, body)


def test_a_trainer_that_leaves_in_the_middle_is_not_waited_for(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        await one.link()
        request = {"run_id": RUN, "version": 1, "sha256": "a" * 64, "tensors": LAYOUT, "action": "receive"}
        await leave(one.state, request, one.receiver.started)
        assert one.receiver.broken.is_set()

    with_trainer(tmp_path, body)


def test_a_claim_ends_the_link(tmp_path: Path) -> None:
    async def body(one: Trainer) -> None:
        await one.link()
        await one.client.post("/session/", json=CLAIM)
        assert outcome(await one.transfer("check")) == (409, "E-SYN-13")
        await one.link()
        assert (await one.transfer("check")).status_code == 200

    with_trainer(tmp_path, body)


def generate(version: int) -> dict[str, Any]:
    return {"request_id": "r", "adapter_version": version, "prompts": [[1]], "sampling": {"max_tokens": 1}}


async def leave(state: ServerState, body: dict[str, Any], started: asyncio.Event) -> None:
    """Send `body` and close the connection once the engine has begun."""
    content = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await started.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json"), (b"host", b"server")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/receive_weights/",
        "raw_path": b"/receive_weights/",
        "query_string": b"",
        "headers": headers,
        "server": ("server", 80),
    }
    await build_app(state)(scope, receive, send)
