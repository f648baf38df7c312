"""Claims and pushes that wait behind others: slow is waited for, hung is found."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import pytest

from axolotl.errors import ServerError
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import AdapterResponse, ErrorBody, SessionResponse
from tests.fakes.engine import FAKE_FINGERPRINT
from tests.fakes.server import ScriptedServer

Connect = Callable[..., ServerClient]
Call = Callable[[ServerClient], AdapterResponse | SessionResponse]
DIGEST = "1" * 64
TIMEOUT_S = 0.4
CALLS: dict[str, Call] = {
    "claim": lambda client: client.claim("r", FAKE_FINGERPRINT),
    "adapter": lambda client: client.set_adapter(1, DIGEST),
    "weights": lambda client: client.set_weights(1, DIGEST),
    "clear": lambda client: client.clear_adapter(),
}


class Keeper:
    """Starts a server again, whatever it was asked for."""

    def __init__(self, server: ScriptedServer) -> None:
        self.revived: list[tuple[str, bool]] = []
        self._server = server

    def revive(self, instance_id: str, *, is_hung: bool) -> None:
        self.revived.append((instance_id, is_hung))
        if is_hung:
            self._server.num_unanswered, self._server.working, self._server.health = 0, "stands", []
            self._server.restart()

    def check_alive(self) -> None:
        pass

    def served(self, instance_id: str) -> None:
        pass


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_as_long_as_the_server_makes_tokens(name: str, server: ScriptedServer, connect: Connect) -> None:
    said: list[str] = []
    client = connect(TIMEOUT_S, say=said.append)
    client.claim("r", FAKE_FINGERPRINT)
    server.num_unanswered, server.working = 12, "grows"
    began = time.monotonic()
    CALLS[name](client)
    assert time.monotonic() - began > 2 * TIMEOUT_S
    assert server.num_unanswered == 0 and said == []


@pytest.mark.parametrize("name", CALLS)
def test_a_call_under_which_nothing_moves_is_hung(name: str, server: ScriptedServer, connect: Connect) -> None:
    client = connect(TIMEOUT_S)
    client.claim("r", FAKE_FINGERPRINT)
    server.num_unanswered = 10**6
    began = time.monotonic()
    with pytest.raises(ServerError, match="alive but makes no progress") as problem:
        CALLS[name](client)
    assert problem.value.code == "E-SRV-05" and "0 tokens" in problem.value.why
    assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + 5


@pytest.mark.parametrize("working", ["stands", "silent"])
def test_a_managed_server_that_does_not_answer_a_push_is_killed(
    working: Literal["stands", "silent"], server: ScriptedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is stopped, or all of it, as after SIGSTOP."""
    monkeypatch.setattr("axolotl.serving.holding.PROGRESS_TIMEOUT_S", 0.1)
    keeper = Keeper(server)
    client = connect(TIMEOUT_S, keeper=keeper)
    client.claim("r", FAKE_FINGERPRINT)
    server.num_unanswered, server.working = 10**6, working
    server.health = ["silent"] * 10 if working == "silent" else []
    assert client.set_adapter(1, DIGEST).instance_id == "instance-2"
    assert keeper.revived[-1] == ("instance-1", True)


def test_what_is_put_back_after_a_restart_may_take_its_time_too(server: ScriptedServer, connect: Connect) -> None:
    client = connect(TIMEOUT_S)
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGEST)
    server.restart()
    server.num_unanswered, server.working = 12, "grows"
    began = time.monotonic()
    assert client.set_adapter(2, "2" * 64).loaded_versions == [1, 2]
    assert time.monotonic() - began > 2 * TIMEOUT_S


def test_a_server_that_stops_while_it_is_asked_who_it_is_costs_a_part_of_the_timeout(
    server: ScriptedServer, connect: Connect
) -> None:
    client = connect(4.0)
    client.claim("r", FAKE_FINGERPRINT)
    server.restart()
    server.num_silent_infos = 1
    began = time.monotonic()
    assert client.set_adapter(1, DIGEST).instance_id == "instance-2"
    assert time.monotonic() - began < 4.0


def test_a_server_without_room_is_waited_for_while_it_makes_tokens(server: ScriptedServer, connect: Connect) -> None:
    client = connect(TIMEOUT_S)
    client.claim("r", FAKE_FINGERPRINT)
    server.push_refusals = [(503, ErrorBody(code="E-SYN-08", what="no room"))] * 12
    server.working = "grows"
    began = time.monotonic()
    assert client.set_adapter(1, DIGEST).adapter_version == 1
    assert time.monotonic() - began > 2 * TIMEOUT_S
