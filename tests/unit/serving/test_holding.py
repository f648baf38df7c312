"""The moment between a new claim and the versions that come back: a proof that it takes what it gets fits in."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from axolotl.errors import SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import CANARY_VERSION
from tests.fakes.engine import FAKE_FINGERPRINT
from tests.fakes.server import Fault, ScriptedServer
from tests.support.requests import expected, request_for

Connect = Callable[..., ServerClient]
CANARY_DIGEST = "c" * 64
DIGESTS = {version: str(version) * 64 for version in range(1, 5)}


def claimed(connect: Connect) -> ServerClient:
    client = connect(sleep=lambda seconds: None)
    client.claim("r", FAKE_FINGERPRINT)
    for version in (1, 2, 3):
        client.set_adapter(version, DIGESTS[version])
    return client


def test_what_is_pushed_in_between_gives_way_to_the_runs_versions(server: ScriptedServer, connect: Connect) -> None:
    client = claimed(connect)
    events: list[object] = []

    def prove() -> None:
        events.append(sorted(server.loaded))
        client.set_adapter(CANARY_VERSION, CANARY_DIGEST)
        events.append(client.score([[1]], [[7]], 1.0, CANARY_VERSION))

    client.on_claimed_again = prove
    client.on_recovered = lambda: events.append(sorted(server.loaded))
    server.calls.clear()
    server.faults = [Fault("restart")]
    assert client.generate(request_for(version=3)) == expected(request_for(version=3), "instance-2")
    pushed = [body["version"] for body in server.bodies("/set_lora_adapter/")]
    # A kept connection may have broken with the server: then the same is asked, and proven, once more.
    assert [version for version, _ in itertools.groupby(pushed)] == [CANARY_VERSION, 2, 3]
    assert events[0] == [] and events[-1] == [2, 3] and events.count([2, 3]) == 1
    # Nor is it remembered: the next restart brings back the run's own versions.
    server.restart()
    client.on_claimed_again = None
    server.calls.clear()
    client.generate(request_for(version=2))
    assert [body["version"] for body in server.bodies("/set_lora_adapter/")] == [2, 3]


def test_a_server_that_goes_again_meanwhile_gets_everything_once_more(server: ScriptedServer, connect: Connect) -> None:
    client = claimed(connect)
    client.on_claimed_again = lambda: client.score([[1]], [[7]], 1.0, 0)
    server.faults = [Fault("restart"), Fault("restart")]
    request = request_for(version=3)
    assert client.generate(request) == expected(request, "instance-3")
    assert sorted(server.loaded) == [2, 3]


def test_what_the_proof_raises_ends_the_call_before_the_versions_are_pushed(
    server: ScriptedServer, connect: Connect
) -> None:
    client = claimed(connect)

    def fail() -> None:
        raise SyncError("no effect", code="E-SYN-11")

    client.on_claimed_again = fail
    server.calls.clear()
    server.restart()
    with pytest.raises(SyncError, match="no effect"):
        client.generate(request_for(version=3))
    assert server.bodies("/set_lora_adapter/") == []
