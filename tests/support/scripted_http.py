"""A client over scripted answers, without a socket, and a clock that only sleeping moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from axolotl.serving.client import ServerClient
from axolotl.serving.wire import INSTANCE_HEADER, PROTOCOL_VERSION, Body, ServerInfo
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
    max_versions=3,
    adapter_version=0,
    loaded_versions=[],
    run_id=None,
)

Script = Callable[[httpx.Request], httpx.Response]


class Clock:
    """Time that passes only while someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def scripted_client(script: Script, clock: Clock, directory: Path, timeout_s: float = 60.0) -> ServerClient:
    return ServerClient(
        "http://127.0.0.1:8000",
        directory,
        timeout_s,
        transport=httpx.MockTransport(script),
        sleep=clock.sleep,
        clock=clock,
    )


def answer(body: Body, status: int = 200, instance: str = "a") -> httpx.Response:
    return httpx.Response(status, content=body.model_dump_json(), headers={INSTANCE_HEADER: instance})


def refused(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def never_answers(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing")
