"""`GET /metrics/`: the server's numbers for Prometheus. The registry is the app's own, so that several apps of one
process do not add up; where vLLM is the engine, its own numbers follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from axolotl.serving.engines.protocol import EngineName
from axolotl.serving.refusals import Refusal
from axolotl.serving.wire import ErrorBody

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


@dataclass(frozen=True)
class Snapshot:
    """What is read at the moment of a scrape. work, generated: see `Progress`."""

    engine: EngineName
    running: int
    work: int
    generated: int
    policy_version: int
    num_held: int
    has_session: bool


class ServerMetrics:
    """read: the numbers of now, None until the engine is up."""

    def __init__(self, read: Callable[[], Snapshot | None]) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        self._registry.register(_Now(read))
        self._requests = Counter(
            "axolotl_requests", "Answers begun, by route and HTTP status.", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "axolotl_request_seconds",
            "From a request to the end of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._refusals = Counter(
            "axolotl_refusals", "Errors answered, by code (see docs/errors).", ["code"], registry=self._registry
        )
        self._loads = Histogram(
            "axolotl_load_seconds",
            "Loading a policy version: verified, loaded, served.",
            ["kind", "outcome"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._claims = Counter("axolotl_sessions", "Runs that claimed the server.", registry=self._registry)

    def text(self) -> bytes:
        now = self._read()
        own = generate_latest(self._registry)
        return own + generate_latest(REGISTRY) if now is not None and now.engine == "vllm" else own

    def claimed(self) -> None:
        self._claims.inc()

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    @contextmanager
    def loading(self, kind: str) -> Iterator[None]:
        """Around the load of a version."""
        started, outcome = time.perf_counter(), "failed"
        try:
            yield
            outcome = "served"
        except Refusal:
            outcome = "refused"
            raise
        finally:
            self._loads.labels(kind, outcome).observe(time.perf_counter() - started)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


class Counted:
    """ASGI middleware around everything else. routes: the paths that are named; others are counted as one."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/") + "/"
        status = 500
        started = time.perf_counter()

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400:
                self._count_refusal(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            self._metrics.refused("E-INT-01")  # answered further out
            raise
        finally:
            route = path if path in self._routes else "other"
            self._metrics.answered(route, status, time.perf_counter() - started)

    def _count_refusal(self, body: bytes) -> None:
        try:
            self._metrics.refused(ErrorBody.model_validate_json(body).code)
        except ValidationError:
            return  # `/health/` while it loads


class _Now(Collector):
    def __init__(self, read: Callable[[], Snapshot | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        yield GaugeMetricFamily("axolotl_up", "1 when it can generate.", value=float(now is not None))
        if now is None:
            return
        yield GaugeMetricFamily("axolotl_requests_running", "Requests to generate or score.", value=now.running)
        yield CounterMetricFamily("axolotl_tokens_processed", "Prompt and sampled tokens.", value=now.work)
        yield CounterMetricFamily("axolotl_tokens_generated", "Sampled tokens.", value=now.generated)
        yield GaugeMetricFamily("axolotl_policy_version", "The newest version; 0: base.", value=now.policy_version)
        yield GaugeMetricFamily("axolotl_policy_versions_held", "Pushed versions in memory.", value=now.num_held)
        yield GaugeMetricFamily("axolotl_session_held", "1 when a run holds the server.", value=float(now.has_session))
