"""The HTTP app: a few lines a route over one engine.

It is built before the engine exists, so that the port answers `/health/` with the phase while the model loads;
`ServerState.ready` fills it. All other routes answer 503 until then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

import axolotl
from axolotl.errors import AxolotlError
from axolotl.serving.adapters import AdapterRegistry
from axolotl.serving.edge import check_generate, invalid
from axolotl.serving.engines.protocol import Engine, EngineRejects
from axolotl.serving.guard import Guard, error_response
from axolotl.serving.refusals import Refusal
from axolotl.serving.seeds import fresh_seeds
from axolotl.serving.session import ACTIVE_S, Session
from axolotl.serving.wire import (
    PROTOCOL_VERSION,
    Completion,
    GenerateRequest,
    GenerateResponse,
    Group,
    Health,
    ServerInfo,
    SessionRequest,
    SessionResponse,
    SetAdapterRequest,
)

_STATUS_CODES = {413: "E-SRV-14"}


@dataclass(frozen=True)
class Serving:
    """What exists once the engine is up."""

    engine: Engine
    registry: AdapterRegistry
    session: Session


@dataclass
class ServerState:
    """The server from its first moment. `health` changes as it loads; `serving` is filled by `ready`.

    instance_id: random, one a process. sync_dir: where published adapters are found, below `adapters/<run_id>/`.
    max_held: adapter versions the engine can hold at once.
    """

    instance_id: str
    token: str
    sync_dir: Path
    max_held: int
    health: Health = field(default_factory=lambda: Health(status="loading", phase="starting"))
    serving: Serving | None = None

    def loading(self, phase: str) -> None:
        self.health = Health(status="loading", phase=phase)

    def ready(self, engine: Engine) -> None:
        registry = AdapterRegistry(
            engine, self.sync_dir / "adapters", instance_id=self.instance_id, max_held=self.max_held
        )
        self.serving = Serving(engine, registry, Session(registry, engine.fingerprint))
        self.health = Health(status="ok", phase="ready")

    def failed(self, reason: str) -> None:
        self.health = Health(status="failed", phase=reason)

    def require(self) -> Serving:
        """Raises a 503 `Refusal` until the engine is up."""
        if self.serving is None:
            raise Refusal(503, "E-SRV-17", f"the server is {self.health.status}", why=self.health.phase)
        return self.serving


def build_app(state: ServerState) -> FastAPI:
    """The app for `state`. Its routes are exactly those of the protocol: no docs, no schema, no dev routes."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Guard, token=state.token, instance_id=state.instance_id)
    _add_error_handlers(app)

    @app.get("/health/")
    async def health() -> Response:
        return Response(
            state.health.model_dump_json(), 200 if state.health.status == "ok" else 503, media_type="application/json"
        )

    @app.get("/server_info/")
    async def server_info() -> Response:
        return _json(_server_info(state, state.require()))

    @app.post("/session/")
    async def session(request: SessionRequest) -> Response:
        serving = state.require()
        await serving.session.claim(request)
        return _json(
            SessionResponse(
                instance_id=state.instance_id,
                run_id=serving.session.run_id,
                adapter_version=serving.registry.current,
                lease_s=ACTIVE_S,
            )
        )

    @app.post("/generate/")
    async def generate(request: GenerateRequest) -> Response:
        serving = state.require()
        engine = serving.engine
        check_generate(request, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size)
        _check_holder(serving.session, request)
        async with serving.registry.use(request.adapter_version):
            groups = await _groups(engine, request)
        # Another run may have taken the server meanwhile, with adapters of the same numbers.
        _check_holder(serving.session, request)
        return _json(
            GenerateResponse(
                request_id=request.request_id,
                instance_id=state.instance_id,
                adapter_version=request.adapter_version,
                groups=groups,
            )
        )

    @app.post("/set_lora_adapter/")
    async def set_lora_adapter(request: SetAdapterRequest) -> Response:
        serving = state.require()
        serving.session.check_run(request.run_id)
        serving.session.touch()
        return _json(await serving.registry.set(request.run_id, request.version, request.manifest_sha256))

    @app.post("/clear_lora_adapter/")
    async def clear_lora_adapter() -> Response:
        serving = state.require()
        serving.session.touch()
        return _json(await serving.registry.clear())

    return app


def _check_holder(session: Session, request: GenerateRequest) -> None:
    """A run's request counts as a sign of life and needs the session; a person's question does neither."""
    if request.run_id is not None:
        session.check_run(request.run_id)
        session.touch()


async def _groups(engine: Engine, request: GenerateRequest) -> list[Group]:
    """Sampled groups, or with `score_ids` the given tokens with their log-probs."""
    version, sampling = request.adapter_version, request.sampling
    try:
        if request.score_ids is None:
            seeds = request.seeds or fresh_seeds(len(request.prompts), sampling.n)
            groups = [group async for group in engine.generate(request.prompts, sampling, seeds, version)]
            groups.sort(key=lambda group: group.index)
            return [
                Group(
                    index=group.index,
                    completions=[
                        Completion(
                            ids=completion.ids,
                            logprobs=_finite(completion.logprobs),
                            finish_reason=completion.finish_reason,
                            log_kept=completion.log_kept,
                        )
                        for completion in group.completions
                    ],
                )
                for group in groups
            ]
        scores = await engine.score(request.prompts, request.score_ids, sampling.temperature, version)
    except EngineRejects as error:
        raise invalid(str(error)) from error
    return [
        Group(index=index, completions=[Completion(ids=ids, logprobs=_finite(values), finish_reason="scored")])
        for index, (ids, values) in enumerate(zip(request.score_ids, scores, strict=True))
    ]


def _finite(values: list[float] | list[float | None]) -> list[float | None]:
    """JSON has no NaN: what is not finite travels as null."""
    return [value if value is not None and math.isfinite(value) else None for value in values]


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
        max_model_len=engine.max_model_len,
        max_lora_rank=engine.max_lora_rank,
        adapter_version=serving.registry.current,
        loaded_versions=serving.registry.loaded_versions,
        run_id=serving.session.run_id,
    )


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, Refusal)
        return error_response(refusal)

    @app.exception_handler(AxolotlError)
    async def engine_fault(_: Request, error: Exception) -> Response:
        assert isinstance(error, AxolotlError)
        return error_response(Refusal.of(error, 500))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        location = [part for part in first["loc"] if part != "body"]
        return error_response(invalid(f"{_dotted(location) or 'body'}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def not_found(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(
            Refusal(error.status_code, _STATUS_CODES.get(error.status_code, "E-SRV-12"), error.detail)
        )

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return error_response(
            Refusal(500, "E-INT-01", "internal error in the server", why=type(error).__name__, do="see its log")
        )


def _dotted(location: list[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
