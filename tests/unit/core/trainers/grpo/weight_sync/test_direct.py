"""Weights from a trainer to a server over a fake NCCL and a real socket: what arrives, and what follows a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axolotl.core.trainers.grpo.weight_sync.direct import DirectWeights
from axolotl.core.trainers.grpo.weight_sync.nccl import NcclSender
from axolotl.errors import NumericError, SyncError
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import AdapterResponse
from tests.fakes.engine import FAKE_FINGERPRINT, FakeEngine
from tests.fakes.nccl import FakeNccl
from tests.fakes.receiver import FakeReceiver
from tests.support.live_server import LiveServer, live_server

RUN = "run-0123456789ab"


class Policy(nn.Module):
    """Two tensors, of which one has another name too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.bias = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
        self.tied = self.weight

    def step(self) -> None:
        with torch.no_grad():
            self.weight.add_(1)


class World:
    """A trainer and a server. said: the lines for the user."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.nccl = FakeNccl()
        self.policy = Policy()
        self.root = tmp_path / "weights" / RUN
        self.said: list[str] = []
        self._tmp_path = tmp_path
        self._stack = stack
        self.server: LiveServer
        self.engine: FakeEngine
        self.receiver: FakeReceiver
        self._running: Any = None
        self.serve("instance-1")
        self.client = stack.enter_context(self.server.client())
        self.client._say = self.said.append
        self.client.wait_ready()
        self.client.claim(RUN, FAKE_FINGERPRINT)
        self.sender = NcclSender(0, self.nccl.library)
        self.delivery = DirectWeights(lambda: self.policy, self.client, self.root, self.sender)

    def serve(self, instance_id: str, *, has_nccl: bool = True) -> None:
        """Another process at another address, which the client is told of as the one it knows."""

        async def create() -> FakeEngine:
            self.receiver = FakeReceiver(self.nccl)
            self.engine = FakeEngine(receiver=self.receiver if has_nccl else None)
            self.engine.num_modules = 2
            return self.engine

        self.stop()
        self._running = live_server(self._tmp_path, create, instance_id=instance_id)
        self.server = self._running.__enter__()

    def restart(self, instance_id: str = "instance-2", *, has_nccl: bool = True) -> None:
        self.serve(instance_id, has_nccl=has_nccl)
        self.client._transport._http.base_url = self.server.url
        self.delivery._link._transport._http.base_url = self.server.url

    def stop(self) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None

    def score(self, version: int) -> list[list[float]]:
        return self.client.score([[1]], [[7]], 1.0, version)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("v*"))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.delenv("AXOLOTL_SERVER_TOKEN", raising=False)
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        try:
            yield world
        finally:
            world.nccl.leave_waiting()
            for communicator in world.nccl.communicators:
                communicator.destroy()
            world.receiver.unlink()
            world.stop()


def test_what_arrives_is_what_was_trained(world: World) -> None:
    world.delivery.connect(is_required=True)
    delivered = world.delivery.deliver(1)
    received = world.receiver.received[1]
    assert {name: tensor.tolist() for name, tensor in received.items()} == {"weight": [1.0, 2.0], "bias": 3.0}
    assert received["bias"].dtype == torch.float32, "the server computes in float32"
    world.policy.step()
    later = world.delivery.deliver(2)
    assert world.receiver.received[2]["weight"].tolist() == [2.0, 3.0]
    assert (world.receiver.num_links, world.files(), world.said) == (1, [], [])
    assert delivered.digest != later.digest
    assert world.score(2) == [[pytest.approx(-3.07)]]


def test_the_same_names_and_shapes_with_other_numbers_have_another_digest(world: World) -> None:
    first = world.delivery.deliver(1).digest
    assert world.delivery.deliver(2).digest == first, "the digest is of the weights, not of their number"
    world.policy.step()
    assert world.delivery.deliver(3).digest != first


def test_weights_that_are_not_finite_are_not_sent(world: World) -> None:
    world.delivery.connect(is_required=True)
    with torch.no_grad():
        world.policy.weight[0] = torch.nan
    with pytest.raises(NumericError) as caught:
        world.delivery.deliver(1)
    assert caught.value.code == "E-NUM-02" and "weight" in caught.value.what
    assert not world.receiver.started.is_set()


def test_a_restarted_server_gets_the_version_as_files_and_is_linked_again_with_the_next(world: World) -> None:
    """The model has moved on by then: what is put back is what was sent."""
    proofs = []
    world.delivery.deliver(1)
    world.policy.step()
    world.client.on_recovered = lambda: proofs.append(world.score(1))
    world.restart()
    recovering = threading.Thread(target=lambda: world.score(1))
    recovering.start()
    recovering.join(20)
    assert not recovering.is_alive(), "no thread but the main one takes part in NCCL, so nobody is waited for"
    assert world.files() == ["v1"] and world.engine.calls.count("weights v1") == 1
    assert len(proofs) == 1 and world.receiver.num_links == 0
    from safetensors.torch import load_file

    (file,) = (world.root / "v1").glob("*.safetensors")
    assert load_file(file)["weight"].tolist() == [1.0, 2.0]
    world.delivery.deliver(2)
    assert world.receiver.received[2]["weight"].tolist() == [2.0, 3.0]
    assert (world.receiver.num_links, world.files()) == (1, [])


def test_a_server_that_was_restarted_unnoticed_gets_this_version_as_files(world: World) -> None:
    world.delivery.deliver(1)
    world.policy.step()
    world.client.on_recovered = lambda: pytest.fail("version 1 is nowhere, and nobody may ask for it")
    world.restart()
    world.delivery.deliver(2)
    assert world.files() == ["v2"] and world.engine.calls.count("weights v2") == 1
    assert any("version 2 goes over files" in line for line in world.said)
    world.delivery.deliver(3)
    assert list(world.receiver.received) == [3], "NCCL was not to blame"


def test_a_claim_in_between_is_followed_by_a_new_link(world: World) -> None:
    world.delivery.deliver(1)
    world.client.claim_again()
    world.delivery.deliver(2)
    assert world.receiver.num_links == 2 and list(world.receiver.received) == [1, 2]


def test_a_transfer_that_fails_at_the_server_is_the_last_one(world: World) -> None:
    world.delivery.deliver(1)
    world.receiver.breaks_after = 1
    world.policy.step()
    reviving = threading.Thread(target=lambda: revive(world))
    reviving.start()
    world.delivery.deliver(2)
    reviving.join(20)
    assert world.nccl.communicators[0].is_destroyed, "or the broadcast would wait for ever"
    assert world.files() == ["v2"] and world.engine.calls.count("weights v2") == 1
    assert any("NCCL failed: the server says: the engine failed" in line for line in world.said)
    world.delivery.deliver(3)
    assert world.files() == ["v3"] and world.receiver.received == {}


@pytest.mark.parametrize("is_early", [False, True])
def test_a_trainer_that_cannot_go_on_tells_the_server(
    world: World, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """Early: before the request of its other thread is there."""
    world.delivery.deliver(1)
    group, receiver = world.nccl.communicators[0], world.receiver
    receiver.started.clear()
    link, failed = world.delivery._link, threading.Event()
    monkeypatch.setattr(link, "leave", after(link.leave, failed))
    if is_early:
        monkeypatch.setattr(link, "receive", before(link.receive, failed))

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        assert is_early or wait_for(receiver.started.is_set)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(group, "broadcast", broadcast)
    reviving = threading.Thread(target=lambda: None if is_early else revive(world))
    reviving.start()
    world.delivery.deliver(2)
    reviving.join(20)
    assert receiver.broken.is_set() is not is_early, "a worker waited for what will not come"
    assert world.files() == ["v2"] and any("CUDA out of memory" in line for line in world.said)


def after(call: Callable[[Any], Any], event: threading.Event) -> Callable[[Any], Any]:
    def wrapped(argument: Any) -> Any:
        try:
            return call(argument)
        finally:
            event.set()

    return wrapped


def before(call: Callable[[Any], Any], event: threading.Event) -> Callable[[Any], Any]:
    def wrapped(argument: Any) -> Any:
        assert event.wait(20)
        return call(argument)

    return wrapped


def revive(world: World) -> None:
    """As a managed server: once the engine is given up, another process serves."""
    assert wait_for(world.receiver.broken.is_set)
    world.restart()


def wait_for(is_so: Callable[[], bool]) -> bool:
    gate = threading.Event()
    for _ in range(4000):
        if is_so():
            return True
        gate.wait(0.005)
    return False


def test_what_the_server_refuses_ends_the_push(world: World) -> None:
    world.delivery.connect(is_required=True)
    world.receiver.refusal = EngineRejects("1 weights are not the model's: tied")
    with pytest.raises(SyncError) as caught:
        world.delivery.deliver(1)
    assert caught.value.code == "E-SYN-01" and "tied" in caught.value.why
    assert not world.nccl.communicators[0].is_destroyed


def test_a_link_that_cannot_be_made_is_an_error_where_nccl_was_asked_for(world: World) -> None:
    world.receiver.link_fault = EngineRejects("NCCL error: duplicate GPU")
    with pytest.raises(SyncError) as caught:
        world.delivery.connect(is_required=True)
    assert caught.value.code == "E-SYN-14" and "duplicate GPU" in caught.value.why and caught.value.do


def test_a_link_that_cannot_be_made_is_a_line_where_nccl_was_one_way(world: World) -> None:
    world.nccl.join_fault = RuntimeError("NCCL error: unhandled system error")
    world.receiver.link_fault = EngineRejects("x")
    world.delivery.connect(is_required=False)
    (line,) = world.said
    assert line.startswith("warning: weights go over files from now on, NCCL failed: ")
    world.delivery.deliver(1)
    assert world.files() == ["v1"] and world.engine.calls.count("weights v1") == 1


def test_a_server_that_came_back_without_nccl_gets_files(world: World) -> None:
    world.delivery.deliver(1)
    world.restart(has_nccl=False)
    world.score(1)
    world.delivery.deliver(2)
    assert world.files() == ["v2"] and any("takes files only" in line for line in world.said)


def test_an_answer_about_something_else_is_not_believed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails the transfer: the weights that the server says it has are not the ones that were sent."""
    wrong = AdapterResponse(
        instance_id="instance-1", adapter_version=1, manifest_sha256="b" * 64, num_modules=2, loaded_versions=[1]
    )
    world.delivery.connect(is_required=True)
    post = world.delivery._link._transport.post

    def lie(path: str, body: Any, *rest: Any) -> Any:
        answer = post(path, body, *rest)
        return wrong if getattr(body, "action", "") == "receive" else answer

    monkeypatch.setattr(world.delivery._link._transport, "post", lie)
    world.delivery.deliver(1)
    assert any("confirms policy version 1" in line for line in world.said) and world.files() == ["v1"]


def test_weights_that_reach_less_than_all_are_an_error(world: World) -> None:
    class Sender:
        def connect(self, *_: object) -> None: ...

        def send(self, *_: object) -> AdapterResponse:
            return AdapterResponse(
                instance_id="instance-1",
                adapter_version=1,
                manifest_sha256="a" * 64,
                num_modules=1,
                loaded_versions=[1],
            )

        def close(self) -> None: ...

    world.delivery.connect(is_required=True)
    world.delivery._sender = Sender()
    with pytest.raises(SyncError) as caught:
        world.delivery.deliver(1)
    assert caught.value.code == "E-SYN-04"
