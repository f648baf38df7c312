"""Waits, retries and checks of the client, against scripted answers and a clock that only sleeping moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from axolotl.errors import AxolotlError, ServerError, SyncError
from axolotl.serving.client import ServerClient, is_loopback
from axolotl.serving.wire import (
    INSTANCE_HEADER,
    PROTOCOL_VERSION,
    Completion,
    ErrorBody,
    GenerateRequest,
    GenerateResponse,
    Group,
    Health,
    Sampling,
    ServerInfo,
)
from tests.fakes.engine import FAKE_FINGERPRINT

INFO = ServerInfo(
    server="axolotl",
    protocol=PROTOCOL_VERSION,
    version="0",
    instance_id="a",
    engine="transformers",
    fingerprint=FAKE_FINGERPRINT,
    device="cpu",
    weight_transports=["files"],
    dtype="float32",
    max_model_len=64,
    max_lora_rank=None,
    adapter_version=0,
    loaded_versions=[],
    run_id=None,
)
REQUEST = GenerateRequest(
    request_id="r", adapter_version=0, prompts=[[1], [2]], sampling=Sampling(n=1, max_tokens=3), seeds=[[1], [2]]
)
GROUPS = [
    Group(index=index, completions=[Completion(ids=[5, 6], logprobs=[-1.0, None], finish_reason="stop")])
    for index in range(2)
]
REPLY = GenerateResponse(request_id="r", instance_id="a", adapter_version=0, groups=GROUPS)

Script = Callable[[httpx.Request], httpx.Response]


class Clock:
    """Time that passes only while someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def no_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AXOLOTL_SERVER_TOKEN", raising=False)


def make(script: Script, clock: Clock, tmp_path: Path, timeout_s: float = 60.0) -> ServerClient:
    return ServerClient(
        "http://127.0.0.1:8000",
        tmp_path,
        timeout_s,
        transport=httpx.MockTransport(script),
        sleep=clock.sleep,
        clock=clock,
    )


def ready(script: Script, clock: Clock, tmp_path: Path) -> ServerClient:
    """A client past its handshake; `script` answers what follows."""

    def with_handshake(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health/":
            return answer(Health(status="ok", phase="ready"))
        if request.url.path == "/server_info/":
            return answer(INFO)
        return script(request)

    client = make(with_handshake, clock, tmp_path)
    client.wait_ready()
    return client


def answer(body: object, status: int = 200, instance: str = "a") -> httpx.Response:
    return httpx.Response(status, content=body.model_dump_json(), headers={INSTANCE_HEADER: instance})


def refused(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def silent(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing")


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        (refused, "E-SRV-01", "connection refused"),
        (silent, "E-SRV-01", "never answers"),
        (lambda _: answer(Health(status="loading", phase="weights"), 503), "E-SRV-01", "weights"),
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


def test_it_starts_as_soon_as_the_server_is_up(clock: Clock, tmp_path: Path) -> None:
    polls = iter([refused, silent, lambda _: answer(Health(status="loading", phase="x"), 503)])

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


def test_the_token_comes_from_the_servers_file_or_the_environment(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def script(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return answer(REPLY)

    client = ready(script, clock, tmp_path)
    client.generate(REQUEST)
    file = {"url": "http://x", "pid": 1, "started": 0.0, "instance_id": "a", "token": "from-file"}
    (tmp_path / "server.json").write_text(json.dumps(file))
    client.generate(REQUEST)
    monkeypatch.setenv("AXOLOTL_SERVER_TOKEN", "from-environment")
    client.generate(REQUEST)
    assert seen == [None, "Bearer from-file", "Bearer from-environment"]


def test_a_refused_token_says_where_it_came_from(clock: Clock, tmp_path: Path) -> None:
    client = ready(lambda _: answer(ErrorBody(code="E-SRV-10", what="no"), 401), clock, tmp_path)
    with pytest.raises(ServerError, match="refuses the token") as problem:
        client.generate(REQUEST)
    assert str(tmp_path / "server.json") in problem.value.why


def test_lost_answers_are_asked_for_again_with_the_same_request(clock: Clock, tmp_path: Path) -> None:
    outcomes: Iterator[Script] = iter([refused, silent, lambda _: httpx.Response(503)])
    bodies: list[bytes] = []

    def script(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return next(outcomes, lambda _: answer(REPLY))(request)

    assert ready(script, clock, tmp_path).generate(REQUEST) == REPLY
    assert len(bodies) == 4 and set(bodies) == {REQUEST.model_dump_json().encode()}


def test_a_server_that_stays_away_is_lost_at_the_deadline(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="is lost") as problem:
        ready(refused, clock, tmp_path).generate(REQUEST)
    assert problem.value.code == "E-SRV-04"
    assert 55 < clock.now <= 60


def test_a_request_that_takes_too_long_says_which_limit_to_raise(clock: Clock, tmp_path: Path) -> None:
    def slow(_: httpx.Request) -> httpx.Response:
        clock.sleep(60)
        raise httpx.ReadTimeout("nothing")

    with pytest.raises(ServerError, match=r"within trl\.vllm_server_timeout") as problem:
        ready(slow, clock, tmp_path).generate(REQUEST)
    assert problem.value.code == "E-SRV-04" and "raise trl.vllm_server_timeout" in problem.value.do
    with pytest.raises(ServerError, match="is lost"):
        ready(slow, clock, tmp_path).clear_adapter()


def lost_in_the_handshake(_: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("half an answer")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (refused, "E-SRV-01"),
        (lost_in_the_handshake, "E-SRV-01"),
        (lambda _: httpx.Response(200, json={"protocol": 1}), "E-SRV-09"),
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


def test_requests_name_the_run_that_holds_the_server(clock: Clock, tmp_path: Path) -> None:
    asked: list[str | None] = []

    def script(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/session/":
            return httpx.Response(200, json={"instance_id": "a", "run_id": "r", "adapter_version": 0})
        body = GenerateRequest.model_validate_json(request.content)
        asked.append(body.run_id)
        return answer(REPLY.model_copy(update={"request_id": body.request_id}))

    client = ready(script, clock, tmp_path)
    client.generate(REQUEST)
    client.claim("r", FAKE_FINGERPRINT)
    client.generate(REQUEST)
    with pytest.raises(ServerError):  # the answer has no scores; what was asked counts
        client.score([[1]], [[7]], 1.0, 0)
    client.release()
    client.generate(REQUEST)
    assert asked == [None, "r", "r", None]


@pytest.mark.parametrize("status", [400, 409, 422, 500])
def test_refusals_are_not_repeated(status: int, clock: Clock, tmp_path: Path) -> None:
    calls: list[int] = []

    def script(_: httpx.Request) -> httpx.Response:
        calls.append(1)
        return answer(ErrorBody(code="E-X", what="bad", why="w", do="d"), status)

    with pytest.raises(ServerError, match="server: bad") as problem:
        ready(script, clock, tmp_path).generate(REQUEST)
    assert (problem.value.code, problem.value.why, problem.value.do, len(calls)) == ("E-X", "w", "d", 1)


def test_refused_adapters_are_sync_errors(clock: Clock, tmp_path: Path) -> None:
    client = ready(lambda _: answer(ErrorBody(code="E-SYN-02", what="bad"), 409), clock, tmp_path)
    with pytest.raises(SyncError) as problem:
        client.clear_adapter()
    assert problem.value.code == "E-SYN-02"


def test_another_instance_is_noticed_even_in_a_refusal(clock: Clock, tmp_path: Path) -> None:
    client = ready(lambda _: answer(ErrorBody(code="E-X", what="?"), 409, instance="b"), clock, tmp_path)
    with pytest.raises(ServerError, match="was restarted") as problem:
        client.generate(REQUEST)
    assert problem.value.code == "E-SRV-04"


def changed(**changes: object) -> GenerateResponse:
    return REPLY.model_copy(update=changes)


def completion(**changes: object) -> list[Group]:
    good = GROUPS[1].completions[0]
    return [GROUPS[0], Group(index=1, completions=[good.model_copy(update=changes)])]


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (changed(request_id="other"), "request_id"),
        (changed(adapter_version=4), "adapter_version"),
        (changed(instance_id="b"), "instance_id"),
        (changed(groups=GROUPS[:1]), "groups"),
        (changed(groups=GROUPS[::-1]), "groups"),
        (changed(groups=[GROUPS[0], Group(index=1, completions=[])]), "0 completions"),
        (changed(groups=completion(logprobs=[-1.0])), "2 tokens and 1 log-probs"),
        (changed(groups=completion(ids=[], logprobs=[])), "0 tokens"),
        (changed(groups=completion(ids=[1] * 4, logprobs=[-1.0] * 4)), "4 tokens"),
        (changed(groups=completion(ids=[5, 100])), "outside the vocabulary"),
    ],
)
def test_answers_to_something_else_are_refused(
    reply: GenerateResponse, named: str, clock: Clock, tmp_path: Path
) -> None:
    with pytest.raises(ServerError) as problem:
        ready(lambda _: answer(reply), clock, tmp_path).generate(REQUEST)
    assert problem.value.code == "E-SRV-09" and named in problem.value.why


def test_answers_that_are_no_answer_are_refused(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(ServerError) as problem:
        ready(lambda _: httpx.Response(200, json={"x": 1}), clock, tmp_path).generate(REQUEST)
    assert problem.value.code == "E-SRV-09"


def test_scores_turn_null_into_nan(clock: Clock, tmp_path: Path) -> None:
    def script(request: httpx.Request) -> httpx.Response:
        request_id = json.loads(request.content)["request_id"]
        scored = Completion(ids=[7, 8], logprobs=[-0.5, None], finish_reason="scored")
        groups = [Group(index=0, completions=[scored])]
        return answer(REPLY.model_copy(update={"request_id": request_id, "groups": groups}))

    ((first, second),) = ready(script, clock, tmp_path).score([[1]], [[7, 8]], 1.0, 0)
    assert first == -0.5 and second != second


def test_release_survives_a_server_that_is_gone(clock: Clock, tmp_path: Path) -> None:
    outcomes: Iterator[Script] = iter(
        [lambda _: httpx.Response(200, json={"instance_id": "a", "run_id": "r", "adapter_version": 0})]
    )
    client = ready(lambda request: next(outcomes, refused)(request), clock, tmp_path)
    client.claim("r", FAKE_FINGERPRINT)
    client.release()
    client.release()


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


def test_every_error_is_one_of_ours(clock: Clock, tmp_path: Path) -> None:
    def broken(_: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("half an answer")

    with pytest.raises(AxolotlError):
        ready(broken, clock, tmp_path).generate(REQUEST)
