"""The thread that renews: it renews, it says when another run has the server, and it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from axolotl.errors import ServerError
from axolotl.serving.client import ServerClient
from tests.fakes.engine import FAKE_FINGERPRINT
from tests.fakes.server import Fault, ScriptedServer
from tests.support.requests import request_for

Connect = Callable[..., ServerClient]


def claimed(connect: Connect) -> ServerClient:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    return client


def wait_for(event: threading.Event) -> None:
    event.clear()
    assert event.wait(5)


def lease_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "server-lease"]


def test_it_renews_a_quarter_of_the_lease_apart_and_ends_with_the_block(
    server: ScriptedServer, connect: Connect
) -> None:
    with claimed(connect).renewing():
        wait_for(server.renewed)
        wait_for(server.renewed)
        (thread,) = lease_threads()
        assert not thread.daemon
    assert lease_threads() == [] and server.renewals >= 2


def test_the_next_call_says_that_another_run_took_the_server(server: ScriptedServer, connect: Connect) -> None:
    client = claimed(connect)
    with client.renewing():
        server.run_id = "another"
        (thread,) = lease_threads()
        thread.join(5)
        assert not thread.is_alive()
        server.calls.clear()
        for call in (lambda: client.generate(request_for()), lambda: client.set_adapter(1, "1" * 64)):
            with pytest.raises(ServerError) as problem:
                call()
            assert problem.value.code == "E-SRV-06"
        assert server.calls == []


def test_a_server_that_forgot_the_run_is_the_business_of_the_next_call(
    server: ScriptedServer, connect: Connect
) -> None:
    client = claimed(connect)
    with client.renewing():
        server.restart()
        wait_for(server.renewed)
        wait_for(server.renewed)
        client.generate(request_for())
        assert server.run_id == "r"


def test_a_server_that_is_away_is_ignored_and_renewed_when_it_is_back(server: ScriptedServer, connect: Connect) -> None:
    with claimed(connect).renewing():
        server.stop()
        server.start()
        wait_for(server.renewed)


def test_closing_takes_less_than_a_second_whatever_the_server_does(
    server: ScriptedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def hold(handler: object, body: object) -> None:
        asked.set()
        server.hold()

    monkeypatch.setattr("tests.fakes.server._Handler._renew", hold)
    with claimed(connect).renewing():
        assert asked.wait(5)
        began = time.monotonic()
    assert time.monotonic() - began < 1


def test_it_does_not_disturb_a_request_that_runs(server: ScriptedServer, connect: Connect) -> None:
    server.faults = [Fault("slow", after=30)]
    client = claimed(connect)
    with client.renewing():
        client.generate(request_for())
    assert server.renewals >= 2
