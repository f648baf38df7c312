"""Waiting for a server: the same deadline for whatever answers, and who it must be."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from axolotl.errors import ServerError, SyncError
from axolotl.serving.client import ServerClient, is_loopback
from axolotl.serving.wire import PROTOCOL_VERSION, Health
from tests.fakes.server import scripted_server
from tests.support.scripted_http import INFO, Clock, Script, answer, never_answers, refused
from tests.support.scripted_http import scripted_client as make


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        (refused, "E-SRV-01", "connection refused"),
        (never_answers, "E-SRV-01", "never answers"),
        (lambda _: httpx.Response(404, text="nope", headers={"server": "nginx"}), "E-SRV-02", "nginx"),
        (lambda _: httpx.Response(200, text="<html>"), "E-SRV-02", "HTTP 200"),
        (lambda _: httpx.Response(503), "E-SRV-02", "HTTP 503"),
    ],
)
def test_the_same_deadline_for_whatever_answers(
    script: Script, code: str, reason: str, clock: Clock, tmp_path: Path
) -> None:
    with pytest.raises(ServerError) as problem:
        make(script, clock, tmp_path).wait_ready()
    assert problem.value.code == code
    assert reason in str(problem.value.report())
    assert clock.now == pytest.approx(60)


def test_no_server_says_how_to_start_one(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(ServerError) as problem:
        make(refused, clock, tmp_path).wait_ready()
    assert problem.value.what == "no server at http://127.0.0.1:8000 after 60 s (connection refused)"
    assert "axolotl vllm-serve config.yaml" in problem.value.do


def test_waiting_is_told_at_once_and_every_thirty_seconds(clock: Clock, tmp_path: Path) -> None:
    times: list[float] = []
    with pytest.raises(ServerError):
        make(refused, clock, tmp_path, timeout_s=70).wait_ready(lambda line: times.append(clock.now))
    assert times[0] == 0 and len(times) == 3
    assert 30 <= times[1] < 33 and 60 <= times[2] < 66


def loads_until(end: float, clock: Clock) -> Script:
    """A server that loads, and is gone from then on."""

    def script(request: httpx.Request) -> httpx.Response:
        return answer(Health(status="loading", phase="weights"), 503) if clock.now < end else refused(request)

    return script


def test_a_server_may_load_for_as_long_as_it_says_so(clock: Clock, tmp_path: Path) -> None:
    def script(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info/":
            return answer(INFO)
        return answer(Health(status="ok", phase="ready")) if clock.now > 1000 else loads_until(2000, clock)(request)

    said: list[str] = []
    assert make(script, clock, tmp_path, timeout_s=60).wait_ready(said.append) == INFO
    assert 1000 < clock.now < 1003
    assert len(said) > 30 and "still loading: weights), for 121 s so far" in said[4]


@pytest.mark.parametrize(("timeout_s", "limit"), [(60, 3600), (7200, 7200)])
def test_a_server_that_loads_for_ever_in_the_same_words_is_given_up(
    timeout_s: float, limit: float, clock: Clock, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match=r"is still loading \(weights\)") as problem:
        make(loads_until(1e9, clock), clock, tmp_path, timeout_s=timeout_s).wait_ready()
    assert problem.value.code == "E-SRV-01" and "it has said the same for" in problem.value.why
    assert "trl.vllm_server_timeout" in problem.value.do
    assert limit <= clock.now < limit + 3


def test_a_server_that_says_something_new_goes_on_loading(clock: Clock, tmp_path: Path) -> None:
    def script(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info/":
            return answer(INFO)
        if clock.now > 10_000:
            return answer(Health(status="ok", phase="ready"))
        return answer(Health(status="loading", phase=f"part {clock.now // 3000:.0f}"), 503)

    assert make(script, clock, tmp_path).wait_ready() == INFO
    assert clock.now > 10_000


def test_the_timeout_counts_from_the_last_time_that_it_said_so(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="connection refused") as problem:
        make(loads_until(500, clock), clock, tmp_path, timeout_s=60).wait_ready()
    assert problem.value.code == "E-SRV-01"
    assert 557 < clock.now <= 561


def test_it_starts_as_soon_as_the_server_is_up(clock: Clock, tmp_path: Path) -> None:
    polls = iter([refused, never_answers, lambda _: answer(Health(status="loading", phase="x"), 503)])

    def script(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info/":
            return answer(INFO)
        return next(polls, lambda _: answer(Health(status="ok", phase="ready")))(request)

    assert make(script, clock, tmp_path).wait_ready() == INFO
    assert clock.now < 1


def test_a_server_that_failed_is_not_waited_for(clock: Clock, tmp_path: Path) -> None:
    client = make(lambda _: answer(Health(status="failed", phase="no such model"), 503), clock, tmp_path)
    with pytest.raises(ServerError, match="failed to start") as problem:
        client.wait_ready()
    assert (problem.value.code, problem.value.why, clock.now) == ("E-SRV-18", "no such model", 0)


def test_what_the_check_raises_ends_the_wait(clock: Clock, tmp_path: Path) -> None:
    def check() -> None:
        raise SyncError("the child is gone")

    with pytest.raises(SyncError):
        make(refused, clock, tmp_path).wait_ready(check=check)
    assert clock.now == 0


def test_another_protocol_is_refused(clock: Clock, tmp_path: Path) -> None:
    def script(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health/":
            return answer(Health(status="ok", phase="ready"))
        return httpx.Response(200, json={**INFO.model_dump(), "protocol": 99})

    with pytest.raises(ServerError, match="does not speak this protocol") as problem:
        make(script, clock, tmp_path).wait_ready()
    assert "protocol 99" in problem.value.why


def lost_in_the_handshake(_: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("half an answer")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (refused, "E-SRV-01"),
        (lost_in_the_handshake, "E-SRV-01"),
        (lambda _: httpx.Response(200, json={"protocol": PROTOCOL_VERSION}), "E-SRV-09"),
    ],
)
def test_a_handshake_that_fails_is_an_error_of_the_server(
    script: Script, code: str, clock: Clock, tmp_path: Path
) -> None:
    def only_healthy(request: httpx.Request) -> httpx.Response:
        return answer(Health(status="ok", phase="ready")) if request.url.path == "/health/" else script(request)

    with pytest.raises(ServerError) as problem:
        make(only_healthy, clock, tmp_path).wait_ready()
    assert problem.value.code == code


def test_a_redirect_is_not_followed(clock: Clock, tmp_path: Path) -> None:
    asked: list[str] = []

    def script(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(307, headers={"location": "http://elsewhere.example/health/"})

    with pytest.raises(ServerError) as problem:
        make(script, clock, tmp_path).wait_ready()
    assert problem.value.code == "E-SRV-02" and "HTTP 307" in problem.value.why
    assert {httpx.URL(url).host for url in asked} == {"127.0.0.1"}


@pytest.mark.parametrize(("url", "warns"), [("http://gpu-box:8000", True), ("http://127.0.0.1:8000", False)])
def test_a_token_that_travels_unencrypted_is_said_once(url: str, warns: bool, clock: Clock, tmp_path: Path) -> None:
    def script(request: httpx.Request) -> httpx.Response:
        return answer(Health(status="ok", phase="ready") if request.url.path == "/health/" else INFO)

    said: list[str] = []
    ServerClient(url, tmp_path, 5, say=said.append, transport=httpx.MockTransport(script)).wait_ready()
    assert len(said) == warns and all("unencrypted" in line for line in said)


def test_a_proxy_never_stands_before_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with scripted_server() as server, ServerClient(server.url, tmp_path, 2) as client:
        assert client.wait_ready().instance_id == "instance-1"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1:1", False),
        ("http://gpu-box:1", False),
    ],
)
def test_loopback(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
