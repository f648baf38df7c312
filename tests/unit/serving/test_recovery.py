"""A lost, restarted or hung server is a pause: nothing is asked for twice, nothing is missing, and every pause ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from axolotl.errors import ServerError, SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.holding import Holding
from axolotl.serving.wire import ErrorBody, Group, ServerInfo
from tests.fakes.engine import FAKE_FINGERPRINT
from tests.fakes.server import Fault, FaultKind, ScriptedServer
from tests.support.requests import expected, request_for

Connect = Callable[..., ServerClient]
DIGESTS = {version: str(version) * 64 for version in range(1, 10)}
SHORT_S = 0.4


def prompts_asked(server: ScriptedServer) -> list[list[int]]:
    return [[prompt[0] for prompt in body["prompts"]] for body in server.bodies("/generate/")]


class FakeKeeper:
    """Notes what it is asked, and does what the test gave it."""

    def __init__(self, on_revive: Callable[[str, bool], None] = lambda instance_id, is_hung: None) -> None:
        self.revived: list[tuple[str, bool]] = []
        self.answered: list[str] = []
        self.num_checks = 0
        self._on_revive = on_revive

    def revive(self, instance_id: str, *, is_hung: bool) -> None:
        self.revived.append((instance_id, is_hung))
        self._on_revive(instance_id, is_hung)

    def check_alive(self) -> None:
        self.num_checks += 1

    def served(self, instance_id: str) -> None:
        self.answered.append(instance_id)


# What is asked again


@pytest.mark.parametrize("kind", ["cut", "half-line", "restart"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_only_what_is_missing_is_asked_for_again(
    kind: FaultKind, after: int, server: ScriptedServer, connect: Connect
) -> None:
    server.faults = [Fault(kind, after=after)]
    seen: list[Group] = []
    request = request_for(3)
    response = connect().generate(request, seen.append)
    assert response == expected(request, server.instance_id, *["instance-1"] * after)
    assert seen == response.groups
    assert prompts_asked(server) == [[1, 2, 3], [1, 2, 3][after:]]


def test_an_answer_cut_after_its_last_group_is_complete(server: ScriptedServer, connect: Connect) -> None:
    server.faults = [Fault("cut", after=3)]
    request = request_for(3)
    assert connect().generate(request) == expected(request)
    assert len(prompts_asked(server)) == 1


def test_it_may_be_cut_again_and_again(server: ScriptedServer, connect: Connect) -> None:
    server.faults = [Fault(kind, after=1) for kind in ("cut", "restart", "cut", "restart")]
    request = request_for(6)
    client = connect(sleep=lambda s: None)
    makers = ["instance-1", "instance-1", "instance-2", "instance-2"]
    assert client.generate(request) == expected(request, "instance-3", *makers)
    assert prompts_asked(server) == [[1, 2, 3, 4, 5, 6][start:] for start in range(5)]
    assert client.instances == {"instance-1", "instance-2", "instance-3"}


def test_seeds_and_scored_tokens_stay_with_their_prompts(server: ScriptedServer, connect: Connect) -> None:
    server.faults = [Fault("cut", after=1)]
    client = connect()
    assert client.score([[1], [2], [3]], [[7], [8], [9]], 1.0, 0) == [[-1.07], [-1.08], [-1.09]]
    assert [body["score_ids"] for body in server.bodies("/generate/")] == [[[7], [8], [9]], [[8], [9]]]


# A server that forgot the run


def test_a_restarted_server_is_claimed_and_gets_its_versions_again(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    proofs: list[list[int]] = []
    client.on_recovered = lambda: proofs.append(sorted(server.loaded))
    client.claim("r", FAKE_FINGERPRINT)
    for version in (1, 2, 3):
        client.set_adapter(version, DIGESTS[version])
    server.faults = [Fault("restart", after=1)]
    server.calls.clear()
    request = request_for(version=3)
    response = client.generate(request)
    assert response == expected(request, "instance-2", "instance-1")
    assert server.routes() == ["/generate/", "/session/", "/set_lora_adapter/", "/set_lora_adapter/", "/generate/"]
    assert [body["version"] for body in server.bodies("/set_lora_adapter/")] == [2, 3]
    assert proofs == [[2, 3]]


def test_full_weights_are_pushed_again_alone(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    client.set_weights(1, DIGESTS[1])
    client.set_weights(2, DIGESTS[2])
    server.restart()
    server.calls.clear()
    assert client.generate(request_for(version=2)).instance_id == "instance-2"
    assert server.routes() == ["/generate/", "/session/", "/set_weights/", "/generate/"]


def test_a_push_to_a_restarted_server_brings_the_versions_before_it(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    server.restart()
    assert client.set_adapter(2, DIGESTS[2]).loaded_versions == [1, 2]
    assert client.generate(request_for(version=1)).instance_id == "instance-2"


def test_a_session_that_was_lost_without_a_restart_is_taken_again(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    server.faults = [Fault("forget")]
    request = request_for(version=1)
    assert client.generate(request) == expected(request)
    server.forget()
    assert client.set_adapter(2, DIGESTS[2]).loaded_versions == [1, 2]


def test_a_version_that_is_missing_is_pushed_again_if_it_was_confirmed(
    server: ScriptedServer, connect: Connect
) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    server.loaded.clear()
    assert client.generate(request_for(version=1)) == expected(request_for(version=1))
    with pytest.raises(ServerError, match="version 7 is not held"):
        client.generate(request_for(version=7))


def test_a_server_that_another_run_took_is_not_taken_back(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    server.run_id = "another"
    for call in (lambda: client.generate(request_for()), lambda: client.set_adapter(1, DIGESTS[1])):
        with pytest.raises(ServerError) as problem:
            call()
        assert problem.value.code == "E-SRV-06"
    assert server.run_id == "another"


def test_another_model_after_a_restart_ends_the_run_at_once(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    server.restart()
    server.fingerprint = FAKE_FINGERPRINT.model_copy(update={"weights": "w2", "base_model": "other"})
    with pytest.raises(ServerError, match="came back with another model: other") as problem:
        client.generate(request_for())
    assert problem.value.code == "E-SRV-07" and "weights" in problem.value.why


def test_a_server_that_comes_back_with_less_room_ends_the_run_before_it_is_given_anything(
    server: ScriptedServer, connect: Connect
) -> None:
    """As one that a person has started again with another config."""

    def holds_three(info: ServerInfo) -> None:
        if info.max_versions < 3:
            raise SyncError(f"the server holds {info.max_versions}", code="E-SYN-09")

    client = connect()
    client.require(holds_three)
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    server.restart()
    assert client.generate(request_for(version=1)).instance_id == "instance-2"
    server.restart()
    server.max_versions = 2
    server.calls.clear()
    with pytest.raises(SyncError, match="holds 2"):
        client.generate(request_for(version=1))
    assert server.routes() == ["/generate/"]
    with pytest.raises(SyncError, match="holds 2"):
        connect().require(holds_three)


def test_the_proof_may_use_the_client_and_is_repeated_when_the_server_goes_again(
    server: ScriptedServer, connect: Connect
) -> None:
    client = connect()
    scores: list[list[list[float]]] = []
    client.on_recovered = lambda: scores.append(client.score([[1]], [[7]], 1.0, 1))
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    server.faults = [Fault("restart"), Fault("restart"), Fault("cut")]
    request = request_for(version=1)
    assert client.generate(request) == expected(request, "instance-3")
    assert scores == [[[-2.07]]]


def test_what_the_proof_raises_ends_the_run(server: ScriptedServer, connect: Connect) -> None:
    def proof() -> None:
        raise ValueError("no effect")

    client = connect()
    client.on_recovered = proof
    client.claim("r", FAKE_FINGERPRINT)
    server.faults = [Fault("restart")]
    with pytest.raises(ValueError, match="no effect"):
        client.generate(request_for())


# Another process of the run


def test_a_guest_waits_until_the_first_process_has_given_the_server_its_versions_again(
    server: ScriptedServer, connect: Connect
) -> None:
    """It claims and pushes nothing itself, and gives nothing back; the first process is busy elsewhere."""
    first, guest, request = connect(), connect(), request_for(version=1)
    proofs: list[list[int]] = []
    first.on_recovered = lambda: proofs.append(sorted(server.loaded))
    first.claim("r", FAKE_FINGERPRINT)
    guest.join("r", FAKE_FINGERPRINT)
    first.set_adapter(1, DIGESTS[1])
    server.faults = [Fault("restart", after=1)]
    with first.renewing(for_guests=True):
        assert guest.generate(request) == expected(request, "instance-2", "instance-1")
    guest.release()
    assert server.run_id == "r" and proofs == [[1]]
    assert [body["version"] for body in server.bodies("/set_lora_adapter/")] == [1, 1]


def test_a_guest_whose_run_is_over_does_not_wait_for_ever(server: ScriptedServer, connect: Connect) -> None:
    guest = connect(SHORT_S, sleep=lambda s: None)
    guest.join("r", FAKE_FINGERPRINT)
    with pytest.raises(ServerError) as problem:
        guest.generate(request_for())
    assert problem.value.code in ("E-SRV-04", "E-SRV-05")


# Waiting


def test_a_pause_is_told_when_it_begins_every_thirty_seconds_and_when_it_ends(
    server: ScriptedServer, connect: Connect
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    said: list[tuple[float, str]] = []
    client = connect(100.0, clock=lambda: now[0], sleep=sleep, say=lambda line: said.append((now[0], line)))
    server.faults = [Fault("restart", after=1)]
    server.health = ["loading"] * 35
    client.generate(request_for())
    begin, first, second, end = said
    assert begin[0] == 0 and begin[1].startswith("pause (generate): the server at http")
    assert "waiting up to 100 s" in begin[1]
    assert 30 <= first[0] < 33 and 60 <= second[0] < 64 and "loading: weights" in first[1]
    assert end[1].startswith("the server is back after 6")


def test_a_server_that_is_loading_or_whose_engine_died_is_waited_for(server: ScriptedServer, connect: Connect) -> None:
    refusals = [(503, "E-SRV-17"), (500, "E-SRV-20"), (500, "E-SRV-21")]
    server.faults = [Fault("refuse", status=status, body=ErrorBody(code=code, what="x")) for status, code in refusals]
    client = connect(sleep=lambda s: None)
    server.health = ["loading", "failed", "stranger"]
    request = request_for()
    assert client.generate(request) == expected(request)
    assert len(prompts_asked(server)) == 4


def test_a_busy_server_is_asked_again_without_a_pause(server: ScriptedServer, connect: Connect) -> None:
    said: list[str] = []
    server.faults = [Fault("refuse", status=429, body=ErrorBody(code="E-SRV-30", what="busy"))] * 3
    waited: list[float] = []
    client = connect(sleep=waited.append, say=said.append)
    client.generate(request_for())
    assert waited == [0.1, 0.2, 0.4] and said == []


def test_a_busy_server_is_given_up_with_its_own_words(server: ScriptedServer, connect: Connect) -> None:
    server.faults = [Fault("refuse", status=503, body=ErrorBody(code="E-SYN-08", what="no room"))] * 1000
    with pytest.raises(SyncError, match="no room"):
        connect(SHORT_S).generate(request_for())


def test_a_request_that_the_engine_fails_twice_is_not_asked_a_third_time(
    server: ScriptedServer, connect: Connect
) -> None:
    server.faults = [Fault("refuse", status=500, body=ErrorBody(code="E-SRV-21", what="failed to generate"))] * 9
    with pytest.raises(ServerError, match="failed to generate"):
        connect().generate(request_for())
    assert len(prompts_asked(server)) == 2


def test_a_server_that_stays_away_is_lost_at_the_deadline(server: ScriptedServer, connect: Connect) -> None:
    client = connect(SHORT_S)
    client.claim("r", FAKE_FINGERPRINT)
    server.faults = [Fault("die", after=1)]
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"is lost \(generate\)") as problem:
        client.generate(request_for())
    assert SHORT_S <= time.monotonic() - began < SHORT_S + 2
    assert problem.value.code == "E-SRV-04" and "--resume" in problem.value.do
    for part in ("not back within", "trl.vllm_server_timeout", "last healthy", "instance instance-1"):
        assert part in problem.value.why


def test_a_server_that_never_answers_health_again_is_lost(server: ScriptedServer, connect: Connect) -> None:
    client = connect(SHORT_S)
    server.faults = [Fault("restart")]
    server.health = ["silent"] * 100
    with pytest.raises(ServerError) as problem:
        client.generate(request_for())
    assert problem.value.code == "E-SRV-04" and "does not answer" in problem.value.why


def test_losing_it_again_and_again_without_progress_ends_at_the_same_deadline(
    server: ScriptedServer, connect: Connect
) -> None:
    client = connect(SHORT_S)
    server.faults = [Fault("restart")] * 1000
    began = time.monotonic()
    with pytest.raises(ServerError) as problem:
        client.generate(request_for())
    assert problem.value.code in {"E-SRV-04", "E-SRV-05"}
    assert time.monotonic() - began < SHORT_S + 2


# Slow and hung


def test_a_healthy_server_whose_requests_stall_makes_no_progress(server: ScriptedServer, connect: Connect) -> None:
    """The handshake is well, then every request is taken and never answered (TRL issue 6973)."""
    server.faults = [Fault("silent")] * 100
    began = time.monotonic()
    with pytest.raises(ServerError, match="alive but makes no progress") as problem:
        connect(1.5).generate(request_for())
    assert problem.value.code == "E-SRV-05"
    assert 1.5 <= time.monotonic() - began < 8


def test_lines_without_progress_are_a_hung_engine(server: ScriptedServer, connect: Connect) -> None:
    server.faults = [Fault("stall", after=1)]
    with pytest.raises(ServerError, match="makes no progress") as problem:
        connect(SHORT_S).generate(request_for())
    assert problem.value.code == "E-SRV-05" and "0 tokens" in problem.value.why
    assert len(prompts_asked(server)) == 1


def test_slow_progress_never_expires(server: ScriptedServer, connect: Connect) -> None:
    server.faults = [Fault("slow", after=120)]
    request = request_for()
    began = time.monotonic()
    assert connect(0.2).generate(request) == expected(request)
    assert time.monotonic() - began > 2 * 0.2


def test_the_time_that_the_caller_takes_does_not_count(server: ScriptedServer, connect: Connect) -> None:
    now = [0.0]

    def slow_scoring(group: Group) -> None:
        now[0] += 1000

    request = request_for()
    assert connect(60.0, clock=lambda: now[0]).generate(request, slow_scoring) == expected(request)


# With a keeper


def test_a_managed_server_that_ended_is_revived_and_gets_everything_again(
    server: ScriptedServer, connect: Connect
) -> None:
    keeper = FakeKeeper(lambda instance_id, is_hung: server.start())
    client = connect(keeper=keeper)
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    server.faults = [Fault("die", after=1)]
    request = request_for(version=1)
    assert client.generate(request) == expected(request, "instance-2", "instance-1")
    assert keeper.revived == [("instance-1", False)]
    assert keeper.answered == ["instance-2"]


def test_a_managed_server_that_hangs_is_killed(server: ScriptedServer, connect: Connect) -> None:
    keeper = FakeKeeper(lambda instance_id, is_hung: server.restart())
    client = connect(SHORT_S, keeper=keeper)
    server.faults = [Fault("stall", after=1)]
    request = request_for()
    assert client.generate(request) == expected(request, "instance-2", "instance-1")
    assert keeper.revived == [("instance-1", True)]
    assert prompts_asked(server) == [[1, 2, 3], [2, 3]]


def test_a_managed_server_that_says_nothing_is_killed_at_the_deadline(server: ScriptedServer, connect: Connect) -> None:
    def revive(instance_id: str, is_hung: bool) -> None:
        if is_hung:
            server.restart()
            server.health.clear()

    keeper = FakeKeeper(revive)
    client = connect(SHORT_S, keeper=keeper)
    server.faults = [Fault("cut")]
    server.health = ["silent"] * 100
    request = request_for()
    assert client.generate(request) == expected(request, "instance-2")
    assert keeper.revived == [("instance-1", False), ("instance-1", True)]
    assert keeper.num_checks > 0


@pytest.mark.parametrize("is_managed", [False, True])
def test_a_server_that_loads_longer_than_the_timeout_is_waited_for(
    is_managed: bool, server: ScriptedServer, connect: Connect
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    keeper = FakeKeeper() if is_managed else None
    client = connect(10.0, keeper=keeper, clock=lambda: now[0], sleep=sleep)
    server.faults = [Fault("restart")]
    server.health = ["loading"] * 50
    request = request_for()
    assert client.generate(request) == expected(request, "instance-2")
    assert now[0] > 60
    assert keeper is None or keeper.revived == [("instance-1", False)]


def test_a_managed_server_that_falls_silent_while_it_loads_is_killed(server: ScriptedServer, connect: Connect) -> None:
    def revive(instance_id: str, is_hung: bool) -> None:
        server.restart()
        server.health = [] if is_hung else ["loading"] * 3 + ["silent"] * 100

    keeper = FakeKeeper(revive)
    client = connect(SHORT_S, keeper=keeper)
    server.faults = [Fault("cut")]
    request = request_for()
    assert client.generate(request) == expected(request, "instance-3")
    assert keeper.revived == [("instance-1", False), ("instance-2", True)]


def test_a_server_that_begins_to_load_again_and_again_is_lost(server: ScriptedServer, connect: Connect) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        server.restart()

    client = connect(10.0, clock=lambda: now[0], sleep=sleep)
    server.faults = [Fault("restart")]
    server.health = ["loading"] * 10_000
    with pytest.raises(ServerError, match="is lost") as problem:
        client.generate(request_for())
    assert problem.value.code == "E-SRV-04" and "is loading: weights" in problem.value.why
    assert 10 <= now[0] < 30


@pytest.mark.parametrize("is_managed", [False, True])
def test_a_server_that_loads_for_ever_in_the_same_words_is_lost(
    is_managed: bool, server: ScriptedServer, connect: Connect
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 100 * seconds

    client = connect(10.0, keeper=FakeKeeper() if is_managed else None, clock=lambda: now[0], sleep=sleep)
    server.faults = [Fault("restart")]
    server.health = ["loading"] * 10_000
    with pytest.raises(ServerError, match="is lost") as problem:
        client.generate(request_for())
    assert problem.value.code == "E-SRV-04" and "is loading: weights" in problem.value.why
    assert 3600 <= now[0] < 4500


@pytest.mark.parametrize("is_managed", [False, True])
def test_a_pause_says_what_is_done_about_a_hung_server(
    is_managed: bool, server: ScriptedServer, connect: Connect
) -> None:
    said: list[str] = []
    keeper = FakeKeeper(lambda instance_id, is_hung: server.restart()) if is_managed else None
    client = connect(SHORT_S, keeper=keeper, say=said.append)
    server.faults = [Fault("stall", after=1)]
    with nullcontext() if is_managed else pytest.raises(ServerError, match="makes no progress"):
        client.generate(request_for())
    assert "waiting up to" not in said[0]
    assert said[0].endswith("it is killed and started again" if is_managed else "giving it up")


def test_the_end_of_the_keepers_patience_is_the_end(server: ScriptedServer, connect: Connect) -> None:
    def spent(instance_id: str, is_hung: bool) -> None:
        raise ServerError("restarts used up", code="E-SRV-24")

    client = connect(keeper=FakeKeeper(spent))
    server.faults = [Fault("restart")]
    with pytest.raises(ServerError, match="restarts used up"):
        client.generate(request_for())


def test_a_request_that_kills_every_server_is_never_counted_as_answered(
    server: ScriptedServer, connect: Connect
) -> None:
    keeper = FakeKeeper()
    proofs: list[list[list[float]]] = []
    client = connect(keeper=keeper, sleep=lambda s: None)
    client.on_recovered = lambda: proofs.append(client.score([[1]], [[7]], 1.0, 0))
    client.claim("r", FAKE_FINGERPRINT)
    server.faults = [Fault("restart"), Fault("slow"), Fault("restart"), Fault("slow"), Fault("refuse")]
    with pytest.raises(ServerError, match="bad"):
        client.generate(request_for())
    assert keeper.answered == [] and len(proofs) == 2


def test_versions_are_remembered_as_the_server_holds_them(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    holding: Holding = client._holding
    client.claim("r", FAKE_FINGERPRINT)
    for version in (1, 2, 3):
        client.set_adapter(version, DIGESTS[version])
    assert [item.version for item in holding.pushed] == [2, 3]
    client.clear_adapter()
    assert holding.pushed == ()


def test_weights_that_no_engine_can_load_are_tried_on_two(server: ScriptedServer, connect: Connect) -> None:
    client = connect(sleep=lambda s: None)
    client.claim("r", FAKE_FINGERPRINT)
    broken = (500, ErrorBody(code="E-SRV-23", what="the reload failed"))
    server.push_refusals = [broken]
    assert client.set_weights(1, DIGESTS[1]).adapter_version == 1
    server.push_refusals = [broken, broken, broken]
    with pytest.raises(ServerError, match="the reload failed"):
        client.set_weights(2, DIGESTS[2])


# Several threads


@pytest.mark.parametrize("is_block", [False, True], ids=["a push", "a block of calls"])
def test_while_a_thread_recovers_the_others_ask_nothing(
    is_block: bool, server: ScriptedServer, connect: Connect
) -> None:
    """A push would be answered, and then lost among the versions that are put back."""
    recovers, main_waits = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            main_waits.set()

    def claimed_again() -> None:
        recovers.set()
        assert main_waits.wait(10)

    client = connect(sleep=sleep)
    client.on_claimed_again = claimed_again
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    server.faults = [Fault("restart")]
    request = request_for(version=1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.generate, request)
        assert recovers.wait(10)
        with client.undisturbed() if is_block else nullcontext():
            assert client.set_adapter(2, DIGESTS[2]).loaded_versions == [1, 2]
        assert answer.result(10) == expected(request, "instance-2")
    pushed = [body["version"] for body in server.bodies("/set_lora_adapter/")]
    assert pushed == [1, 1, 2] and server.current == 2


def test_no_other_thread_recovers_in_the_middle_of_a_block(server: ScriptedServer, connect: Connect) -> None:
    waits = threading.Event()

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            waits.set()

    recovered_by: list[str] = []
    client = connect(sleep=sleep)
    client.on_claimed_again = lambda: recovered_by.append(threading.current_thread().name)
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    request = request_for(version=1)
    with ThreadPoolExecutor(1) as pool:
        with client.undisturbed():
            server.faults = [Fault("restart")]
            answer = pool.submit(client.generate, request)
            assert waits.wait(10)
            assert recovered_by == []
            assert client.set_adapter(2, DIGESTS[2]).loaded_versions == [1, 2]
        assert answer.result(10) == expected(request, "instance-2")
    assert recovered_by == [threading.main_thread().name]


def test_the_time_that_another_thread_took_is_not_the_calls_own(server: ScriptedServer, connect: Connect) -> None:
    """A block of calls may take longer than the timeout, and the server was well all the time."""
    now, waits, release = [0.0], threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            waits.set()
            assert release.wait(10)

    client = connect(60.0, clock=lambda: now[0], sleep=sleep)
    request = request_for()
    server.faults = [Fault("cut", after=1)]
    with ThreadPoolExecutor(1) as pool:
        with client.undisturbed():
            answer = pool.submit(client.generate, request)
            assert waits.wait(10)
            now[0] += 1000
        release.set()
        assert answer.result(10) == expected(request)


# Many faults, many threads


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_on_the_way_the_answer_is_the_same(
    seed: int, server: ScriptedServer, connect: Connect
) -> None:
    dice = random.Random(seed)
    dead = ErrorBody(code="E-SRV-20", what="the engine died")
    client = connect(sleep=lambda s: None)
    client.on_recovered = lambda: None if sorted(server.loaded) == [1, 2] else pytest.fail("versions are missing")
    client.claim("r", FAKE_FINGERPRINT)
    for version in (1, 2):
        client.set_adapter(version, DIGESTS[version])
    kinds: list[FaultKind] = ["cut", "half-line", "restart", "error-line", "forget", "slow"]
    server.faults = [Fault(dice.choice(kinds), after=dice.randrange(3), body=dead) for _ in range(12)]
    server.health = [dice.choice(["ok", "loading", "failed", "stranger"]) for _ in range(12)]
    request, seen = request_for(8, version=2), list[int]()
    response = client.generate(request, lambda group: seen.append(group.index))
    makers = [server.makers[prompt[0]] for prompt in request.prompts]
    assert response.groups == expected(request, "", *makers).groups
    assert set(makers) <= client.instances
    assert sorted(seen) == list(range(8))


def test_threads_that_lose_the_server_together_recover_once(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    with ThreadPoolExecutor(4) as pool:
        server.faults = [Fault("slow", after=20)] * 4
        asked = [pool.submit(client.generate, request_for(4, version=1)) for _ in range(4)]
        assert all(server.asked.acquire(timeout=10) for _ in range(4))
        server.restart()
        server.faults = [Fault("restart", after=1)]
        responses = [future.result(20) for future in (*asked, pool.submit(client.generate, request_for(4, version=1)))]
    for response in responses:
        makers = [group.instance_id or "" for group in response.groups]
        assert response.groups == expected(request_for(4, version=1), "", *makers).groups
        assert set(makers) <= client.instances
    # The first claim, and one for each process after the first that was asked anything.
    assert len(server.bodies("/session/")) <= 3
