"""Typed calls against a scripted server: what is asked, what is believed, and what kind of error a refusal is."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from axolotl import failpoints
from axolotl.errors import AxolotlError, ConfigError, NumericError, ServerError, SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import ErrorBody, Group, Health, Sampling
from tests.fakes.engine import FAKE_FINGERPRINT
from tests.fakes.server import Fault, FaultKind, ScriptedServer
from tests.support.requests import expected, request_for
from tests.support.scripted_http import INFO, Clock, answer, scripted_client

Connect = Callable[..., ServerClient]
DIGESTS = {version: str(version) * 64 for version in range(1, 10)}


# Generation


def test_groups_come_one_by_one_and_the_answer_is_whole(server: ScriptedServer, connect: Connect) -> None:
    request, seen = request_for(), list[Group]()
    response = connect().generate(request, seen.append)
    assert response == expected(request)
    assert seen == response.groups
    assert server.bodies("/generate/")[0]["stream"] is True


def test_the_stream_can_be_left_early(connect: Connect) -> None:
    client, request = connect(), request_for()
    groups = client.stream(request)
    assert next(groups) == expected(request).groups[0]
    groups.close()
    assert client.generate(request) == expected(request)


def test_what_the_callback_raises_passes_through(connect: Connect) -> None:
    def callback(group: Group) -> None:
        raise KeyError(group.index)

    with pytest.raises(KeyError, match="0"):
        connect().generate(request_for(), callback)


def test_a_failpoint_is_behind_a_request_to_generate_and_not_one_to_score(
    server: ScriptedServer, connect: Connect
) -> None:
    failpoints.arm({failpoints.VARIABLE: "gen.sent=raise:RuntimeError"})
    client = connect()
    try:
        client.score([[1, 2]], [[3, 4]], 1.0, 0)
        with pytest.raises(RuntimeError, match=failpoints.VARIABLE):
            client.generate(request_for())
    finally:
        failpoints.arm({})
    assert len(server.bodies("/generate/")) == 2, "the server had it already"


@pytest.mark.parametrize("kind", ["stall", "die"])
def test_a_wait_can_be_left_and_a_callback_is_none(kind: FaultKind, server: ScriptedServer, connect: Connect) -> None:
    """As a signal does it: what is raised in a wait ends the call, whether for tokens or for a server that is away."""
    inside: list[int] = []
    outside: list[bool] = []
    is_wanted = threading.Event()

    @contextmanager
    def waiting() -> Iterator[None]:
        assert not inside, "a wait inside a wait"
        inside.append(1)
        try:
            if is_wanted.is_set():
                raise KeyboardInterrupt
            yield
        finally:
            inside.pop()

    client = connect(waiting=waiting)
    server.faults = [Fault("slow"), Fault(kind, after=1)]
    client.generate(request_for(), lambda group: outside.append(not inside))
    assert outside == [True] * 3
    with pytest.raises(KeyboardInterrupt):
        client.generate(request_for(), lambda group: is_wanted.set())
    assert not inside


def test_requests_name_the_run_that_holds_the_server(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.generate(request_for())
    client.claim("r", FAKE_FINGERPRINT)
    client.generate(request_for())
    client.score([[1]], [[7]], 1.0, 0)
    client.release()
    client.generate(request_for())
    assert [body["run_id"] for body in server.bodies("/generate/")] == [None, "r", "r", None]


def test_scores_are_those_of_the_given_tokens(connect: Connect) -> None:
    assert connect().score([[1], [2]], [[7, 8], [9]], 1.0, 0) == [[-1.07, -1.08], [-1.09]]


def test_log_probs_that_are_not_finite_are_nan(server: ScriptedServer, connect: Connect) -> None:
    server.faults = [Fault("not-finite")]
    ((first, second, third),) = connect().score([[1]], [[7, 8, 9]], 1.0, 0)
    assert math.isnan(first) and math.isnan(second) and third == -1.09


@pytest.mark.parametrize(
    ("kind", "after", "named"),
    [
        ("version", 0, "adapter_version is 1"),
        ("instance", 0, "instance_id is 'liar'"),
        ("counts", 0, "3 completions, not 2"),
        ("double", 1, "came twice"),
        ("stranger", 1, "group 99 was not asked for"),
        ("missing", 0, "1 groups are missing"),
        ("garbage", 1, "not of this protocol"),
        ("http-500", 0, "HTTP 500"),
        ("redirect", 0, "HTTP 307"),
    ],
)
def test_answers_to_something_else_are_refused_at_once(
    kind: FaultKind, after: int, named: str, server: ScriptedServer, connect: Connect
) -> None:
    server.faults = [Fault(kind, after=after)]
    with pytest.raises(ServerError) as problem:
        connect().generate(request_for())
    assert problem.value.code == "E-SRV-09" and named in problem.value.why
    assert server.routes() == ["/generate/"]


def test_a_refusal_is_raised_once_with_the_servers_words(server: ScriptedServer, connect: Connect) -> None:
    for kind, after in (("refuse", 0), ("error-line", 2)):
        server.faults = [Fault(kind, after=after, status=422)]  # type: ignore[arg-type]
        server.calls.clear()
        with pytest.raises(ServerError, match="server: bad") as problem:
            connect().generate(request_for())
        assert (problem.value.code, problem.value.why, problem.value.do) == ("E-X", "w", "d")
        assert server.routes() == ["/generate/"]


@pytest.mark.parametrize(
    ("code", "kind"), [("E-SYN-01", SyncError), ("E-NUM-02", NumericError), ("E-SRV-16", ServerError)]
)
def test_the_code_of_a_refusal_says_its_kind(
    code: str, kind: type[AxolotlError], server: ScriptedServer, connect: Connect
) -> None:
    server.faults = [Fault("refuse", status=500, body=ErrorBody(code=code, what="no"))]
    with pytest.raises(kind) as problem:
        connect().generate(request_for())
    assert type(problem.value) is kind


# Claim and versions


def test_an_option_that_the_engine_does_not_support_is_an_error_of_the_config(
    server: ScriptedServer, connect: Connect
) -> None:
    server.claim_refusal = (422, ErrorBody(code="E-SRV-19", what="top_q is not supported", do="remove it"))
    with pytest.raises(ConfigError, match="top_q") as problem:
        connect().claim("r", FAKE_FINGERPRINT, Sampling(max_tokens=1, extra={"top_q": 1}))
    assert (problem.value.exit_code, problem.value.do) == (2, "remove it")
    assert server.bodies("/session/")[0]["sampling"]["extra"] == {"top_q": 1}


def test_a_held_server_is_refused_at_once(server: ScriptedServer, connect: Connect) -> None:
    server.claim_refusal = (409, ErrorBody(code="E-SRV-06", what="in use by run x"))
    with pytest.raises(ServerError, match="in use by run x"):
        connect().claim("r", FAKE_FINGERPRINT)
    assert server.routes() == ["/session/"]


def test_release_survives_a_server_that_is_gone(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    server.stop()
    client.release()
    client.release()


def test_a_pushed_version_is_confirmed(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    assert client.set_adapter(1, DIGESTS[1]).loaded_versions == [1]
    assert client.set_weights(2, DIGESTS[2]).loaded_versions == [2]
    assert client.generate(request_for(version=2)) == expected(request_for(version=2))
    assert client.clear_adapter().loaded_versions == []
    pushes = [server.bodies(route)[0] for route in ("/set_lora_adapter/", "/set_weights/")]
    assert [(body["run_id"], body["version"]) for body in pushes] == [("r", 1), ("r", 2)]


def test_a_push_that_confirms_something_else_is_a_sync_error(
    server: ScriptedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    client.set_adapter(1, DIGESTS[1])
    monkeypatch.setattr(ScriptedServer, "current", property(lambda self: 1, lambda self, value: None), raising=False)
    with pytest.raises(SyncError, match="confirms policy version 1") as problem:
        client.set_adapter(2, DIGESTS[2])
    assert problem.value.code == "E-SYN-01"


@pytest.mark.parametrize(("num_refusals", "comes"), [(3, True), (4, False)])
def test_files_that_a_network_shows_late_are_asked_for_again(
    num_refusals: int, comes: bool, server: ScriptedServer, connect: Connect
) -> None:
    waited: list[float] = []
    client = connect(sleep=waited.append)
    client.claim("r", FAKE_FINGERPRINT)
    server.push_refusals = [(409, ErrorBody(code="E-SYN-02", what="other files"))] * num_refusals
    if comes:
        assert client.set_adapter(1, DIGESTS[1]).adapter_version == 1
    else:
        with pytest.raises(SyncError, match="other files"):
            client.set_adapter(1, DIGESTS[1])
    assert sum(waited) == 5 and len(waited) == 3


def test_other_refusals_of_a_push_are_not_repeated(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.claim("r", FAKE_FINGERPRINT)
    server.push_refusals = [(422, ErrorBody(code="E-SYN-04", what="no module"))]
    with pytest.raises(SyncError, match="no module"):
        client.set_adapter(1, DIGESTS[1])
    assert server.routes().count("/set_lora_adapter/") == 1


# Counters and the token


def test_progress(server: ScriptedServer, connect: Connect) -> None:
    client = connect()
    client.generate(request_for())
    assert client.progress().work == 30
    server.stop()
    # A connection kept from before may still be open when the server ends: it breaks off instead of refusing a new one.
    with pytest.raises(ServerError) as problem:
        client.progress()
    assert problem.value.code == "E-SRV-04"


def token_script(request: httpx.Request) -> httpx.Response:
    match request.url.path:
        case "/health/":
            return answer(Health(status="ok", phase="ready"))
        case "/server_info/":
            return answer(INFO)
    return answer(ErrorBody(code="E-SRV-10", what="no"), 401)


def test_the_token_comes_from_the_servers_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AXOLOTL_SERVER_TOKEN", raising=False)
    seen: list[str | None] = []

    def script(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return token_script(request)

    client = scripted_client(script, Clock(), tmp_path)
    client.wait_ready()
    file = {"url": "http://x", "pid": 1, "started": 0.0, "instance_id": "a", "token": "from-file"}
    (tmp_path / "server.json").write_text(json.dumps(file))
    client.wait_ready()
    monkeypatch.setenv("AXOLOTL_SERVER_TOKEN", "from-environment")
    client.wait_ready()
    assert seen[::2] == [None, "Bearer from-file", "Bearer from-environment"]


def test_a_refused_token_says_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AXOLOTL_SERVER_TOKEN", raising=False)
    client = scripted_client(token_script, Clock(), tmp_path)
    client.wait_ready()
    for call in (lambda: client.generate(request_for()), client.progress):
        with pytest.raises(ServerError, match="refuses the token") as problem:
            call()
        assert problem.value.code == "E-SRV-03" and str(tmp_path / "server.json") in problem.value.why
