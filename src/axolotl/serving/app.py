"""The HTTP app: a few lines a route over one engine.

It is built before the engine exists, so that the port answers `/health/` with the phase while the model loads;
`ServerState.ready` fills it. The routes that need the engine answer 503 until then, and again once it is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

import axolotl
from axolotl.serving.edge import check_generate
from axolotl.serving.engines.protocol import Engine
from axolotl.serving.faults import add_error_handlers, refusal_of
from axolotl.serving.generation import finished_groups
from axolotl.serving.guard import Guard
from axolotl.serving.metrics import CONTENT_TYPE, Counted, ServerMetrics, Snapshot
from axolotl.serving.refusals import Refusal
from axolotl.serving.run_directories import RunDirectories
from axolotl.serving.session import LEASE_S, Session
from axolotl.serving.streaming import ClientGone, StreamedAnswer, unless_gone
from axolotl.serving.transfers import Transfers
from axolotl.serving.versions import PolicyVersions
from axolotl.serving.wire import (
    PROTOCOL_VERSION,
    STREAM_INTERVAL_S,
    ClearAdapterRequest,
    GenerateRequest,
    GenerateResponse,
    Group,
    Health,
    LinkRequest,
    LinkResponse,
    Progress,
    ServerInfo,
    SessionRequest,
    SessionResponse,
    SetAdapterRequest,
    SetWeightsRequest,
    StreamStart,
    TransferRequest,
)

T = TypeVar("T")

ROUTES = (
    ("GET", "/health/"),
    ("GET", "/server_info/"),
    ("GET", "/progress/"),
    ("GET", "/metrics/"),
    ("POST", "/session/"),
    ("POST", "/generate/"),
    ("POST", "/set_lora_adapter/"),
    ("POST", "/clear_lora_adapter/"),
    ("POST", "/set_weights/"),
    ("POST", "/link_weights/"),
    ("POST", "/receive_weights/"),
)


@dataclass(frozen=True)
class Serving:
    """What exists once the engine is up."""

    engine: Engine
    versions: PolicyVersions
    session: Session
    transfers: Transfers


@dataclass
class ServerState:
    """The server from its first moment. `health` changes as it loads; `serving` is filled by `ready`.

    instance_id: random, one a process. sync_dir: where published versions are found. max_held: adapters the engine can
    hold at once. broken: set when the engine can serve no more; the reason is in `health`.
    """

    instance_id: str
    token: str
    sync_dir: Path
    max_held: int
    health: Health = field(default_factory=lambda: Health(status="loading", phase="starting"))
    serving: Serving | None = None
    broken: asyncio.Event = field(default_factory=asyncio.Event)

    def loading(self, phase: str) -> None:
        self.health = Health(status="loading", phase=phase)

    def ready(self, engine: Engine) -> None:
        versions = PolicyVersions(engine, self.sync_dir, instance_id=self.instance_id, max_held=self.max_held)
        session = Session(versions, engine, RunDirectories(self.sync_dir))
        self.serving = Serving(engine, versions, session, Transfers(engine, versions))
        self.health = Health(status="ok", phase="ready")

    def failed(self, reason: str) -> None:
        """It did not start, or the engine broke."""
        self.health = Health(status="failed", phase=reason)
        if self.serving is not None:
            self.broken.set()

    def require(self) -> Serving:
        """Raises a 503 `Refusal` unless the engine is up."""
        if self.serving is None:
            raise Refusal(503, "E-SRV-17", f"the server is {self.health.status}", why=self.health.phase)
        if self.broken.is_set():
            raise Refusal(503, "E-SRV-20", "the engine can no longer serve", why=self.health.phase)
        return self.serving

    def snapshot(self) -> Snapshot | None:
        serving = self.serving
        if serving is None or self.broken.is_set():
            return None
        progress = serving.engine.progress()
        return Snapshot(
            engine=serving.engine.name,
            running=serving.versions.num_in_flight,
            work=progress.work,
            generated=progress.generated,
            policy_version=serving.versions.current,
            num_held=len(serving.versions.loaded_versions),
            has_session=serving.session.run_id is not None,
        )


def build_app(state: ServerState) -> FastAPI:
    """The app for `state`. Its routes are exactly `ROUTES`: no docs, no schema, no dev routes."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    metrics = ServerMetrics(state.snapshot)
    app.add_middleware(Guard, token=state.token, instance_id=state.instance_id)
    app.add_middleware(Counted, metrics=metrics, routes=frozenset(path for _, path in ROUTES))
    add_error_handlers(app)
    _add_reading_routes(app, state, metrics)
    _add_generation(app, state)
    _add_changing_routes(app, state, metrics)
    _add_transfers(app, state, metrics)
    return app


def _add_reading_routes(app: FastAPI, state: ServerState, metrics: ServerMetrics) -> None:
    @app.get("/health/")
    async def health() -> Response:
        return _json(state.health, 200 if state.health.status == "ok" else 503)

    @app.get("/server_info/")
    async def server_info() -> Response:
        return _json(_server_info(state, state.require()))

    @app.get("/progress/")
    async def progress() -> Response:
        serving = state.require()
        now = serving.engine.progress()
        return _json(
            Progress(
                instance_id=state.instance_id,
                work=now.work,
                generated=now.generated,
                running=serving.versions.num_in_flight,
                adapter_version=serving.versions.current,
            )
        )

    @app.get("/metrics/")
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/generate/")
    async def generate(request: GenerateRequest, connection: Request) -> Response:
        serving = state.require()
        engine = serving.engine
        check_generate(request, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size)
        groups = finished_groups(engine, serving.versions, serving.session, request)
        head = {
            "request_id": request.request_id,
            "instance_id": state.instance_id,
            "adapter_version": request.adapter_version,
        }
        if request.stream:
            start, work = StreamStart(**head), lambda: engine.progress().work
            return await StreamedAnswer.begin(groups, start, work, interval_s=STREAM_INTERVAL_S)

        async def all_groups() -> list[Group]:
            return sorted([group async for group in groups], key=lambda group: group.index)

        try:
            return _json(GenerateResponse(**head, groups=await unless_gone(connection.receive, all_groups())))
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        finally:
            await groups.aclose()


def _add_changing_routes(app: FastAPI, state: ServerState, metrics: ServerMetrics) -> None:
    @app.post("/session/")
    async def session(request: SessionRequest) -> Response:
        serving = state.require()
        await serving.session.handle(request)
        if request.action == "claim":
            metrics.claimed()
        return _json(
            SessionResponse(
                instance_id=state.instance_id,
                run_id=serving.session.run_id,
                adapter_version=serving.versions.current,
                lease_s=LEASE_S,
            )
        )

    @app.post("/set_lora_adapter/")
    async def set_lora_adapter(request: SetAdapterRequest) -> Response:
        serving = state.require()
        with serving.session.request(request.run_id), metrics.loading("adapter"):
            return _json(await serving.versions.set_adapter(request.run_id, request.version, request.manifest_sha256))

    @app.post("/clear_lora_adapter/")
    async def clear_lora_adapter(request: ClearAdapterRequest) -> Response:
        serving = state.require()
        with serving.session.request(request.run_id):
            return _json(await serving.versions.clear())

    @app.post("/set_weights/")
    async def set_weights(request: SetWeightsRequest) -> Response:
        serving = state.require()
        with serving.session.request(request.run_id), metrics.loading("weights"):
            work = serving.versions.set_weights(request.run_id, request.version, request.manifest_sha256)
            return _json(await _or_broken(state, work))


def _add_transfers(app: FastAPI, state: ServerState, metrics: ServerMetrics) -> None:
    """A trainer that leaves in the middle is waited for by nobody: its link or half of its weights end the engine."""

    @app.post("/link_weights/")
    async def link_weights(request: LinkRequest, connection: Request) -> Response:
        serving = state.require()
        with serving.session.request(request.run_id):
            num_ranks = 0
            if request.action == "leave":
                serving.transfers.leave(request.unique_id)
            else:
                try:
                    work = _or_broken(state, serving.transfers.link(request.unique_id))
                    num_ranks = await unless_gone(connection.receive, work)
                except ClientGone:
                    return Response(status_code=499)
            return _json(LinkResponse(instance_id=state.instance_id, num_ranks=num_ranks))

    @app.post("/receive_weights/")
    async def receive_weights(request: TransferRequest, connection: Request) -> Response:
        serving = state.require()
        with serving.session.request(request.run_id):
            if request.action == "check":
                serving.transfers.check(request)
            else:
                try:
                    with metrics.loading("weights"):
                        work = _or_broken(state, serving.transfers.receive(request))
                        await unless_gone(connection.receive, work)
                except ClientGone:
                    return Response(status_code=499)
            return _json(serving.versions.response())


async def _or_broken(state: ServerState, work: Coroutine[Any, Any, T]) -> T:
    """The result of something that replaces weights. What it raises besides a refusal breaks the server: some weights
    may be the new ones, and only a new process can say again what it serves."""
    try:
        return await work
    except Refusal:
        raise
    except Exception as error:
        body = refusal_of(error).body
        state.failed(f"{body.what}: {body.why}" if body.why else body.what)
        raise


def _server_info(state: ServerState, serving: Serving) -> ServerInfo:
    engine = serving.engine
    return ServerInfo(
        server="axolotl",
        protocol=PROTOCOL_VERSION,
        version=axolotl.__version__,
        instance_id=state.instance_id,
        engine=engine.name,
        fingerprint=engine.fingerprint,
        dtype=engine.dtype,
        device=engine.device,
        weight_transports=list(engine.weight_transports),
        weight_ranks=list(engine.receiver.ranks) if engine.receiver is not None else [],
        max_model_len=engine.max_model_len,
        max_lora_rank=engine.max_lora_rank,
        max_versions=serving.versions.max_held,
        adapter_version=serving.versions.current,
        loaded_versions=serving.versions.loaded_versions,
        run_id=serving.session.run_id,
    )


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")
