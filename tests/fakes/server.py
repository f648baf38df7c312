"""A server on a real socket that goes wrong on command. Tokens are those of `tests.fakes.engine`.

    server.faults = [Fault("cut", after=1)]     the next request to generate breaks off after one group

Each request to generate takes one fault from the list; without one it is answered well. Health polls take their
answers from `health` in the same way.
"""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from axolotl.serving.wire import (
    INSTANCE_HEADER,
    PROTOCOL_VERSION,
    Body,
    ClearAdapterRequest,
    Completion,
    ErrorBody,
    Fingerprint,
    GenerateRequest,
    Group,
    Health,
    ServerInfo,
    SessionRequest,
    SetAdapterRequest,
    StreamEnd,
    StreamError,
    StreamGroup,
    StreamProgress,
    StreamStart,
)
from tests.fakes.engine import FAKE_FINGERPRINT

LINE_INTERVAL_S = 0.005
HOLD_S = 30.0

FaultKind = Literal[
    "cut",  # closes the connection after `after` groups
    "half-line",  # closes it in the middle of a group
    "restart",  # as cut, and another process answers from then on: base weights, no session
    "die",  # as cut, and nobody listens any more
    "silent",  # takes the request and never answers
    "stall",  # after `after` groups nothing but lines of progress without any
    "slow",  # `after` lines of progress that grow, then the answer
    "refuse",  # answers `body` with `status`
    "error-line",  # as refuse, as a line after `after` groups
    "garbage",  # a line that is no JSON
    "http-500",  # a page of somebody else
    "redirect",
    "version",  # says it used another version
    "instance",  # says it is another process, in the first line only
    "counts",  # a completion too many
    "double",  # a group twice
    "stranger",  # a group that nobody asked for
    "missing",  # leaves the last group out
    "not-finite",  # log-probs null and NaN
    "forget",  # drops the session and the adapters, then answers as it must
]


_BAD = ErrorBody(code="E-X", what="bad", why="w", do="d")


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    after: int = 0
    status: int = 409
    body: ErrorBody = _BAD


class ScriptedServer:
    """calls: (route, parsed body) of everything but health and renewals. loaded: the versions it holds.
    makers: by the first token of a prompt, the instance that sent its group last.
    asked: released for each request to generate. renewed: set by each renewal.

    Settable at any time: faults, health (`ok`, `loading`, `failed`, `silent`, `stranger`), push_refusals,
    claim_refusal, fingerprint; num_unanswered: so many claims, pushes and clears are taken and never answered;
    num_silent_infos: so many questions who it is are not answered; answer: the group of a prompt, by its place in the
    request, else `expected_group`;
    working: how the counter of `/progress/` does meanwhile, `grows`, `stands` or `silent` (no answer).
    """

    def __init__(self) -> None:
        self.instance_id = "instance-1"
        self.fingerprint: Fingerprint = FAKE_FINGERPRINT
        self.max_versions = 3
        self.faults: list[Fault] = []
        self.health: list[str] = []
        self.push_refusals: list[tuple[int, ErrorBody]] = []
        self.claim_refusal: tuple[int, ErrorBody] | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.makers: dict[int, str] = {}
        self.num_unanswered = self.num_silent_infos = 0
        self.answer: Callable[[GenerateRequest, int], Group] = expected_group
        self.working: Literal["grows", "stands", "silent"] = "stands"
        self.asked = threading.Semaphore(0)
        self.renewed = threading.Event()
        self.renewals = 0
        self.run_id: str | None = None
        self.loaded: dict[int, str] = {}
        self.current = 0
        self.work = 0
        self.num_restarts = 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._listener: _Listener | None = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def routes(self) -> list[str]:
        return [route for route, _ in self.calls]

    def bodies(self, route: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == route]

    def start(self) -> None:
        """Listen, again at the same port if it has listened before."""
        self._closing = threading.Event()
        self._listener = _Listener(("127.0.0.1", self._port), self)
        self._port = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), name="scripted-server", daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more; requests that are held are let go."""
        self._closing.set()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown()
            listener.server_close()

    def restart(self) -> None:
        """Another process at the same address: base weights, no session."""
        with self._lock:
            self.num_restarts += 1
            self.instance_id = f"instance-{self.num_restarts + 1}"
            self.forget()
            self.work = 0

    def forget(self) -> None:
        self.run_id, self.loaded, self.current = None, {}, 0

    def hold(self) -> None:
        self._closing.wait(HOLD_S)

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def info(self) -> ServerInfo:
        return ServerInfo(
            server="axolotl",
            protocol=PROTOCOL_VERSION,
            version="0",
            instance_id=self.instance_id,
            engine="transformers",
            fingerprint=self.fingerprint,
            dtype="float32",
            device="cpu",
            weight_transports=["files"],
            max_model_len=64,
            max_lora_rank=None,
            max_versions=self.max_versions,
            adapter_version=self.current,
            loaded_versions=sorted(self.loaded),
            run_id=self.run_id,
        )


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    try:
        yield server
    finally:
        server.stop()


def logprob(token: int, version: int) -> float:
    return -(1 + version + token / 100)


def expected_group(request: GenerateRequest, index: int) -> Group:
    """What the fake answers to prompt `index`."""
    version = request.adapter_version
    if request.score_ids is not None:
        rows, reason = [request.score_ids[index]], "scored"
    else:
        assert request.seeds is not None
        lengths = range(request.sampling.max_tokens)
        rows = [[(seed + position + version) % 100 for position in lengths] for seed in request.seeds[index]]
        reason = "length"
    return Group(
        index=index,
        completions=[
            Completion(ids=ids, logprobs=[logprob(token, version) for token in ids], finish_reason=reason)
            for ids in rows
        ],
    )


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], fake: ScriptedServer) -> None:
        self.fake = fake
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def fake(self) -> ScriptedServer:
        return self.server.fake

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        if self.path == "/health/":
            self._health(self.fake.health.pop(0) if self.fake.health else "ok")
        elif self.path == "/server_info/":
            if self.fake.num_silent_infos > 0:
                self.fake.num_silent_infos -= 1
                self.fake.hold()
            self._answer(self.fake.info())
        else:
            fake = self.fake
            if fake.working == "silent":
                fake.hold()
            fake.work += fake.working == "grows"
            counters = {"work": fake.work, "generated": fake.work, "running": 0, "adapter_version": fake.current}
            self._send(200, json.dumps({"instance_id": fake.instance_id, **counters}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("action") == "renew":
            self._renew(body)
            return
        self.fake.calls.append((self.path, body))
        if self.path == "/generate/":
            self.fake.asked.release()
        elif self.fake.num_unanswered > 0:
            self.fake.num_unanswered -= 1
            self.fake.hold()
            return
        match self.path:
            case "/session/":
                self._session(SessionRequest.model_validate(body))
            case "/generate/":
                self._generate(GenerateRequest.model_validate(body))
            case "/clear_lora_adapter/":
                self._clear(ClearAdapterRequest.model_validate(body))
            case _:
                self._push(SetAdapterRequest.model_validate(body))

    # -- routes

    def _health(self, how: str) -> None:
        match how:
            case "silent":
                self.fake.hold()
            case "stranger":
                self._send(404, b"nope")
            case "ok":
                self._answer(Health(status="ok", phase="ready"))
            case _:
                self._answer(Health(status=how, phase="weights"), 503)  # type: ignore[arg-type]

    def _renew(self, body: dict[str, Any]) -> None:
        self.fake.renewals += 1
        if body["run_id"] != self.fake.run_id:
            self._answer(ErrorBody(code="E-SRV-06", what=f"run {body['run_id']} does not hold this server"), 409)
        else:
            self._session_answer()
        self.fake.renewed.set()

    def _session(self, request: SessionRequest) -> None:
        if request.action == "release":
            self.fake.run_id = None
        elif self.fake.claim_refusal is not None:
            status, body = self.fake.claim_refusal
            self._answer(body, status)
            return
        else:
            self.fake.forget()
            self.fake.run_id = request.run_id
        self._session_answer()

    def _session_answer(self) -> None:
        body = {"instance_id": self.fake.instance_id, "run_id": self.fake.run_id, "adapter_version": 0, "lease_s": 0.08}
        self._send(200, json.dumps(body).encode())

    def _push(self, request: SetAdapterRequest) -> None:
        fake = self.fake
        if fake.push_refusals:
            status, body = fake.push_refusals.pop(0)
            self._answer(body, status)
            return
        if request.run_id != fake.run_id:
            self._answer(ErrorBody(code="E-SRV-06", what="not yours", why=f"it is held by {fake.run_id}"), 409)
            return
        if self.path == "/set_weights/":
            fake.loaded = {}
        fake.loaded.pop(request.version, None)
        fake.loaded[request.version] = request.manifest_sha256
        for old in list(fake.loaded)[:-2]:
            del fake.loaded[old]
        fake.current = request.version
        self._adapter()

    def _clear(self, request: ClearAdapterRequest) -> None:
        fake = self.fake
        if request.run_id != fake.run_id:
            self._answer(ErrorBody(code="E-SRV-06", what="not yours", why=f"it is held by {fake.run_id}"), 409)
            return
        fake.loaded, fake.current = {}, 0
        self._adapter()

    def _adapter(self) -> None:
        fake = self.fake
        body = {"instance_id": fake.instance_id, "adapter_version": fake.current, "num_modules": 4}
        body |= {"manifest_sha256": fake.loaded.get(fake.current), "loaded_versions": sorted(fake.loaded)}
        self._send(200, json.dumps(body).encode())

    def _generate(self, request: GenerateRequest) -> None:
        fault = self.fake.faults.pop(0) if self.fake.faults else Fault("slow")
        if self._before_the_answer(fault) or self._refused(request):
            return
        with suppress(_Cut):
            self._stream(request, fault)
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _before_the_answer(self, fault: Fault) -> bool:
        """Whether that was all."""
        match fault.kind:
            case "silent":
                self.fake.hold()
                self.close_connection = True
            case "refuse":
                self._answer(fault.body, fault.status)
            case "http-500":
                self._send(500, b"<html>oops</html>")
            case "redirect":
                self.send_response(307)
                self.send_header("location", self.fake.url + "/elsewhere/")
                self.send_header("content-length", "0")
                self.end_headers()
            case "forget":
                self.fake.forget()
                return False
            case _:
                return False
        return True

    def _refused(self, request: GenerateRequest) -> bool:
        fake = self.fake
        if request.run_id is not None and request.run_id != fake.run_id:
            held = fake.run_id or "no run"
            self._answer(ErrorBody(code="E-SRV-06", what="does not hold", why=f"it is held by {held}"), 409)
            return True
        if request.adapter_version not in {0, *fake.loaded}:
            self._answer(ErrorBody(code="E-SRV-13", what=f"version {request.adapter_version} is not held"), 409)
            return True
        return False

    # -- the streamed answer

    def _stream(self, request: GenerateRequest, fault: Fault) -> None:
        instance_id = self.fake.instance_id
        self.send_response(200)
        self.send_header(INSTANCE_HEADER, instance_id)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._line(
            StreamStart(
                request_id=request.request_id,
                instance_id="liar" if fault.kind == "instance" else instance_id,
                adapter_version=request.adapter_version + (fault.kind == "version"),
            )
        )
        if fault.kind == "slow":
            self._progress(fault.after, grows=True)
        groups = [_spoilt(self.fake.answer(request, index), fault) for index in range(len(request.prompts))]
        if fault.kind == "missing":
            del groups[-1]
        for position, group in enumerate(groups):
            if position == fault.after:
                self._in_the_middle(fault, group)
            self.fake.work += 10
            self.fake.makers[request.prompts[position][0]] = instance_id
            self._line(StreamGroup(group=group))
        if len(groups) == fault.after:
            self._in_the_middle(fault, groups[-1])
        self._line(StreamEnd())

    def _in_the_middle(self, fault: Fault, group: Group) -> None:
        match fault.kind:
            case "cut":
                raise _Cut
            case "half-line":
                line = StreamGroup(group=group).model_dump_json().encode()[:20]
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n0\r\n\r\n")
                raise _Cut
            case "restart":
                self.fake.restart()
                raise _Cut
            case "die":
                self.fake.restart()
                self.fake.stop()
                raise _Cut
            case "stall":
                self._progress(10**6, grows=False)
                raise _Cut
            case "error-line":
                self._line(StreamError(status=fault.status, error=fault.body))
                self.wfile.write(b"0\r\n\r\n")
                raise _Cut
            case "garbage":
                self._chunk(b"<html>\n")
            case "double":
                self._line(StreamGroup(group=group))
            case "stranger":
                self._line(StreamGroup(group=group.model_copy(update={"index": 99})))

    def _progress(self, times: int, *, grows: bool) -> None:
        for _ in range(times):
            if self.fake.is_closing:
                raise _Cut
            self.fake.work += grows
            self._line(StreamProgress(work=self.fake.work))
            time.sleep(LINE_INTERVAL_S)

    # -- bytes

    def _line(self, line: Body) -> None:
        # NaN is no JSON, but Python's parsers and some servers have it.
        self._chunk(line.model_dump_json().replace("-12345.0", "NaN").encode() + b"\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _answer(self, body: Body, status: int = 200) -> None:
        self._send(status, body.model_dump_json().encode())

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header(INSTANCE_HEADER, self.fake.instance_id)
        self.send_header("content-length", str(len(content)))
        # As a process that ends, one that stops listening keeps no connection.
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(content)


class _Cut(Exception):
    """The connection ends here."""


def _spoilt(group: Group, fault: Fault) -> Group:
    first, *others = group.completions
    match fault.kind:
        case "counts":
            return group.model_copy(update={"completions": [first, *group.completions]})
        case "not-finite":
            values = [None, -12345.0, *first.logprobs[2:]]
            return group.model_copy(update={"completions": [first.model_copy(update={"logprobs": values}), *others]})
        case _:
            return group
