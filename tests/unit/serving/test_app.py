"""What the protocol suite cannot reach over a ready server: loading, failing, oversized bodies, engine faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families

from axolotl.errors import ServerError
from axolotl.serving.app import ServerState, build_app
from axolotl.serving.guard import MAX_BODY_BYTES
from axolotl.serving.run_directories import RunDirectories
from axolotl.serving.session import LEASE_S, Session
from axolotl.serving.wire import INSTANCE_HEADER, ErrorBody, GenerateResponse
from tests.fakes.engine import FAKE_FINGERPRINT, FakeEngine
from tests.support.adapters import publish_fake, publish_fake_weights
from tests.support.claims import claim_of_this_process
from tests.support.protocol_suite import ROUTES, generate_request

HEADERS = {"authorization": "Bearer secret"}


def with_app(tmp_path: Path, body: Callable[[httpx.AsyncClient, ServerState], Awaitable[None]]) -> None:
    async def run() -> None:
        state = ServerState(instance_id="i-1", token="secret", sync_dir=tmp_path, max_held=3)
        transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=HEADERS) as client:
            await asyncio.wait_for(body(client, state), 20)

    asyncio.run(run())


def error_of(reply: httpx.Response) -> ErrorBody:
    return ErrorBody.model_validate_json(reply.content)


def test_until_the_engine_is_up_only_health_answers(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        state.loading("reading weights")
        reply = await client.get("/health")
        assert (reply.status_code, reply.json()) == (503, {"status": "loading", "phase": "reading weights"})
        assert (await client.get("/server_info/")).status_code == 503
        reply = await client.post("/generate/", json=generate_request().model_dump())
        assert (reply.status_code, error_of(reply).code, error_of(reply).why) == (503, "E-SRV-17", "reading weights")
        state.failed("no such model")
        assert (await client.get("/health")).json() == {"status": "failed", "phase": "no such model"}
        state.ready(FakeEngine())
        assert (await client.get("/health")).status_code == 200

    with_app(tmp_path, body)


def test_the_routes_are_those_of_the_protocol(tmp_path: Path) -> None:
    app = build_app(ServerState(instance_id="i", token="t", sync_dir=tmp_path, max_held=3))
    assert {(next(iter(route.methods)), route.path) for route in app.routes} == set(ROUTES)


def test_every_answer_names_the_instance(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        for path, headers in (("/health/", {}), ("/nothing", {}), ("/server_info/", {"authorization": "x"})):
            assert (await client.get(path, headers=headers)).headers[INSTANCE_HEADER] == "i-1"

    with_app(tmp_path, body)


@pytest.mark.parametrize("is_announced", [True, False])
def test_bodies_that_are_too_large_are_not_read(tmp_path: Path, is_announced: bool) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield b" " * (1 << 20)

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        state.ready(FakeEngine())
        headers = {"content-type": "application/json"}
        if is_announced:
            headers["content-length"] = str(MAX_BODY_BYTES + 1)
        reply = await client.post("/generate/", content=chunks(), headers=headers)
        assert (reply.status_code, error_of(reply).code) == (413, "E-SRV-14")
        assert sent <= MAX_BODY_BYTES + (1 << 20)

    with_app(tmp_path, body)


def test_log_probs_that_are_not_finite_travel_as_null(tmp_path: Path) -> None:
    """The fake engine's log-prob of token 99 is NaN."""

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        state.ready(FakeEngine())
        request = generate_request(seeds=[[98, 1], [2, 3], [4, 5]])
        reply = await client.post("/generate/", json=request.model_dump())
        completion = GenerateResponse.model_validate_json(reply.content).groups[0].completions[0]
        assert (completion.ids[:2], completion.logprobs[:2]) == ([98, 99], [-1.98, None])

    with_app(tmp_path, body)


@pytest.mark.parametrize(
    ("fault", "code", "what"),
    [
        (RuntimeError("secret /path"), "E-INT-01", "internal error in the server"),
        (ServerError("the engine died", code="E-SRV-20"), "E-SRV-20", "the engine died"),
    ],
)
def test_engine_faults_are_500_without_their_insides(tmp_path: Path, fault: Exception, code: str, what: str) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        engine = FakeEngine()
        engine.fault = fault
        state.ready(engine)
        reply = await client.post("/generate/", json=generate_request().model_dump())
        assert (reply.status_code, error_of(reply).code, error_of(reply).what) == (500, code, what)
        assert "/path" not in reply.text
        assert (await values(client))["axolotl_refusals_total", (("code", code),)] == 1

    with_app(tmp_path, body)


def test_a_push_during_generation_leaves_the_request_its_version(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        engine = FakeEngine()
        state.ready(engine)
        claim = {"run_id": "run", "host": "elsewhere", "pid": 1, "fingerprint": FAKE_FINGERPRINT.model_dump()}
        assert (await client.post("/session/", json=claim)).status_code == 200

        async def push(version: int) -> list[int]:
            digest = publish_fake(tmp_path, "run", version)
            body = {"run_id": "run", "version": version, "manifest_sha256": digest}
            reply = await client.post("/set_lora_adapter/", json=body)
            return reply.json()["loaded_versions"]

        await push(1)
        engine.gate.clear()
        request = generate_request(adapter_version=1)
        running = asyncio.create_task(client.post("/generate/", json=request.model_dump()))
        await engine.started.wait()
        assert (await push(2), await push(3)) == ([1, 2], [1, 2, 3])
        engine.gate.set()
        assert (await running).json()["adapter_version"] == 1
        assert await push(4) == [3, 4]

    with_app(tmp_path, body)


@pytest.mark.parametrize(("run_id", "status"), [("first", 409), (None, 200)])
def test_a_server_taken_during_a_request_gives_the_loser_no_answer(
    tmp_path: Path, run_id: str | None, status: int
) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        engine = FakeEngine()
        state.ready(engine)
        claim = claim_of_this_process("first")
        assert (await client.post("/session/", json=claim)).status_code == 200
        engine.gate.clear()
        request = {**generate_request().model_dump(), "run_id": run_id}
        running = asyncio.create_task(client.post("/generate/", json=request))
        await engine.started.wait()
        assert (await client.post("/session/", json={**claim, "run_id": "second"})).status_code == 200
        engine.gate.set()
        reply = await running
        assert reply.status_code == status
        assert status == 200 or error_of(reply).code == "E-SRV-06"

    with_app(tmp_path, body)


def test_only_the_requests_of_the_holder_are_a_sign_of_life(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        state.ready(FakeEngine())
        assert state.serving is not None
        now = 0.0
        session = Session(
            state.serving.versions, state.serving.engine, RunDirectories(state.sync_dir), clock=lambda: now
        )
        state.serving = replace(state.serving, session=session)
        claim = {"run_id": "first", "host": "elsewhere", "pid": 1, "fingerprint": FAKE_FINGERPRINT.model_dump()}
        other = {**claim, "run_id": "second", "pid": 2}
        assert (await client.post("/session/", json=claim)).status_code == 200
        question = generate_request().model_dump()
        now = LEASE_S - 1
        assert (await client.post("/generate/", json={**question, "run_id": "first"})).status_code == 200
        now += LEASE_S - 1
        assert (await client.post("/generate/", json=question)).status_code == 200
        assert (await client.post("/session/", json=other)).status_code == 409
        now += 2
        assert (await client.post("/session/", json=other)).status_code == 200

    with_app(tmp_path, body)


# Metrics


def test_metrics_count_what_happened(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        assert (await values(client))["axolotl_up", ()] == 0
        engine = FakeEngine()
        state.ready(engine)
        claim = {"run_id": "run", "host": "elsewhere", "pid": 1, "fingerprint": FAKE_FINGERPRINT.model_dump()}
        await client.post("/session/", json=claim)
        for version, digest in ((1, publish_fake(tmp_path, "run", 1)), (2, "0" * 64)):
            push = {"run_id": "run", "version": version, "manifest_sha256": digest}
            await client.post("/set_lora_adapter/", json=push)
        await client.post("/generate/", json=generate_request().model_dump())
        await client.get("/nothing")
        engine.gate.clear()
        running = asyncio.create_task(client.post("/generate", json=generate_request().model_dump()))
        await engine.started.wait()
        found = await values(client)
        assert (
            found.items()
            >= {
                ("axolotl_up", ()): 1,
                ("axolotl_sessions_total", ()): 1,
                ("axolotl_session_held", ()): 1,
                ("axolotl_requests_total", (("route", "/generate/"), ("status", "200"))): 1,
                ("axolotl_requests_total", (("route", "other"), ("status", "404"))): 1,
                ("axolotl_load_seconds_count", (("kind", "adapter"), ("outcome", "served"))): 1,
                ("axolotl_load_seconds_count", (("kind", "adapter"), ("outcome", "refused"))): 1,
                ("axolotl_refusals_total", (("code", "E-SYN-06"),)): 1,
                ("axolotl_refusals_total", (("code", "E-SRV-12"),)): 1,
                ("axolotl_policy_version", ()): 1,
                ("axolotl_policy_versions_held", ()): 1,
                ("axolotl_tokens_processed_total", ()): engine.work,
            }.items()
        )
        while (await values(client))["axolotl_requests_running", ()] != 1:
            await asyncio.sleep(0)
        engine.gate.set()
        await running
        assert (await values(client))["axolotl_requests_running", ()] == 0

    with_app(tmp_path, body)


def test_the_numbers_of_vllm_follow_ours(tmp_path: Path) -> None:
    """vLLM registers its own with the process; the name of this one says that it is a stand-in."""
    theirs = Gauge("vllm_stand_in", "A number of vLLM's.")

    class Renamed(FakeEngine):
        name = "vllm"

    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        state.ready(FakeEngine())
        assert ("vllm_stand_in", ()) not in await values(client)
        state.ready(Renamed())
        found = await values(client)
        assert ("vllm_stand_in", ()) in found and ("axolotl_up", ()) in found

    try:
        with_app(tmp_path, body)
    finally:
        REGISTRY.unregister(theirs)


async def values(client: httpx.AsyncClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    reply = await client.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(reply.text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


# Full weights


def test_an_engine_that_breaks_on_weights_ends_the_server(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        engine = FakeEngine()
        engine.breaks_on_load = True
        state.ready(engine)
        claim = {"run_id": "run", "host": "elsewhere", "pid": 1, "fingerprint": FAKE_FINGERPRINT.model_dump()}
        await client.post("/session/", json=claim)
        digest = publish_fake_weights(tmp_path, "run", 1)
        push = {"run_id": "run", "version": 1, "manifest_sha256": digest}
        reply = await client.post("/set_weights/", json=push)
        assert (reply.status_code, error_of(reply).code) == (500, "E-SRV-23")
        assert state.broken.is_set()
        health = await client.get("/health/")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "failed to replace its weights" in health.json()["phase"]
        reply = await client.post("/generate/", json=generate_request().model_dump())
        assert (reply.status_code, error_of(reply).code) == (503, "E-SRV-20")

    with_app(tmp_path, body)


def test_refused_weights_leave_the_server_as_it_was(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient, state: ServerState) -> None:
        state.ready(FakeEngine())
        claim = {"run_id": "run", "host": "elsewhere", "pid": 1, "fingerprint": FAKE_FINGERPRINT.model_dump()}
        await client.post("/session/", json=claim)
        digest = publish_fake_weights(tmp_path, "run", 1, weights=b"bad")
        push = {"run_id": "run", "version": 1, "manifest_sha256": digest}
        reply = await client.post("/set_weights/", json=push)
        assert (reply.status_code, error_of(reply).code) == (422, "E-SYN-01")
        assert not state.broken.is_set()
        assert (await client.post("/generate/", json=generate_request().model_dump())).status_code == 200
        assert (await client.post("/set_weights/", json={**push, "run_id": "other"})).status_code == 409

    with_app(tmp_path, body)
