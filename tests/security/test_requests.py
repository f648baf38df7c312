"""Cases of the security review that are one request: every route, and nothing of it reaches a file."""

from __future__ import annotations

import asyncio
import gzip
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from axolotl.serving.app import ServerState, build_app
from axolotl.serving.manifest import Kind, write_manifest
from axolotl.serving.wire import ErrorBody
from tests.fakes.engine import FAKE_FINGERPRINT, FakeEngine
from tests.support.adapters import publish_fake
from tests.support.protocol_suite import ROUTES

RUN = "run-0123456789ab"
TOKEN = {"authorization": "Bearer secret"}
PROTECTED = sorted(set(ROUTES) - {("GET", "/health/")})


def with_app(
    tmp_path: Path, body: Callable[[httpx.AsyncClient], Awaitable[None]], engine: type[FakeEngine] = FakeEngine
) -> None:
    """The app over a fake engine, claimed by `RUN`; `body` talks to it as a process on this machine would."""

    async def run() -> None:
        state = ServerState(instance_id="i-1", token="secret", sync_dir=tmp_path / "sync", max_held=3)
        state.ready(engine())
        transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=TOKEN) as client:
            claim = {"run_id": RUN, "host": "h", "pid": 1, "fingerprint": FAKE_FINGERPRINT.model_dump()}
            (await client.post("/session/", json=claim)).raise_for_status()
            await asyncio.wait_for(body(client), 20)

    asyncio.run(run())


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, ErrorBody.model_validate_json(reply.content).code


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_a_route_opens_with_the_token_alone(tmp_path: Path, method: str, path: str) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for wrong in ("", "Bearer ", "Bearer guess", "Bearer secre", "Bearer secrets", "bearer secret", "secret"):
            for spelling in (path, path.rstrip("/"), path + "/"):
                reply = await client.request(method, spelling, json={}, headers={"authorization": wrong})
                assert code(reply) == (401, "E-SRV-10"), (wrong, spelling)
        assert (await client.request(method, path + "?token=secret", json={}, headers={"authorization": ""})).is_error
        assert (await client.request(method, path, json={})).status_code != 401

    with_app(tmp_path, body)


def test_how_long_a_refusal_takes_says_nothing_of_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer depends on the comparison in constant time, and on nothing before it that saw the token."""
    compared: list[tuple[bytes, bytes]] = []

    def all_alike(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return True

    async def body(client: httpx.AsyncClient) -> None:
        compared.clear()
        for given in ("", "x", "Bearer secreT", "Bearer " + "s" * 5_000):
            assert (await client.get("/server_info/", headers={"authorization": given})).status_code == 200
            assert compared.pop() == (given.encode(), b"Bearer secret") and not compared

    monkeypatch.setattr(hmac, "compare_digest", all_alike)
    with_app(tmp_path, body)


@pytest.mark.parametrize(("method", "path"), sorted(ROUTES))
def test_no_web_page_reaches_a_route(tmp_path: Path, method: str, path: str) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for headers in (
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"origin": "http://127.0.0.1:8000"},
            {"host": "evil.example"},
        ):
            reply = await client.request(method, path, json={}, headers=headers)
            assert code(reply) == (403, "E-SRV-11"), headers
            assert not [name for name in reply.headers if name.startswith("access-control")]
        reply = await client.options(path, headers={"access-control-request-method": method})
        assert reply.status_code in (404, 405)

    with_app(tmp_path, body)


@pytest.mark.parametrize(("method", "path"), [route for route in PROTECTED if route[0] == "POST"])
def test_bodies_are_plain_json_only(tmp_path: Path, method: str, path: str) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "application/x-pickle",
            "",
        ):
            reply = await client.request(method, path, content=b"{}", headers={"content-type": kind})
            assert code(reply) == (415, "E-SRV-15"), kind
        bomb = {"content-type": "application/json", "content-encoding": "gzip"}
        reply = await client.request(method, path, content=gzip.compress(b" " * (8 << 20)), headers=bomb)
        assert code(reply) == (415, "E-SRV-15")

    with_app(tmp_path, body)


BAD_IDS: list[tuple[str, Any]] = [
    *(
        ("run_id", text)
        for text in ("../x", "..", ".", "/etc", "~root", "%2e%2e", "a\0", "．．", "a" * 4096, "", "A/b")
    ),
    *(("version", number) for number in (0, -1, 2**31, 10**400, 1.5, "../1", None, [1])),
    *(("manifest_sha256", text) for text in ("../x", "0" * 63, "0" * 65, "G" * 64, "", None)),
    ("lora_path", "/etc"),
    ("path", "../x"),
    ("lora_local_path", "evil/adapter"),
]


@pytest.mark.parametrize("path", ["/set_lora_adapter/", "/set_weights/"])
@pytest.mark.parametrize(("key", "value"), BAD_IDS)
def test_what_is_no_id_never_becomes_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, key: str, value: Any
) -> None:
    """Everything that looks at the published files goes through these two; both would end the request with 500."""

    def looked(*_: object, **__: object) -> None:
        raise AssertionError("it looked at the file system")

    monkeypatch.setattr("axolotl.serving.versions.verify_manifest", looked)
    monkeypatch.setattr("axolotl.serving.versions.check_unchanged", looked)

    async def body(client: httpx.AsyncClient) -> None:
        good = {"run_id": RUN, "version": 1, "manifest_sha256": "0" * 64}
        assert (await client.post(path, json=good)).status_code == 500, "the good one does look"
        reply = await client.post(path, json={**good, key: value})
        assert code(reply) == (422, "E-SRV-16") and key in reply.text
        assert str(tmp_path) not in reply.text

    with_app(tmp_path, body)


@pytest.mark.parametrize(
    "text",
    ['{"temperature": NaN}', '{"temperature": 1e999}', '{"top_p": Infinity}', '{"extra": {"a": NaN}}']
    + ['{"extra": ' + '{"a":' * 50 + "1" + "}" * 51, '{"structured_regex": "' + "a" * 5_000 + '"}', '{"n": 257}'],
)
def test_sampling_that_is_out_of_bounds_is_422(tmp_path: Path, text: str) -> None:
    sampling = '{"max_tokens": 1, ' + text[1:]
    content = '{"request_id": "r", "adapter_version": 0, "prompts": [[1]], "sampling": ' + sampling + "}"

    async def body(client: httpx.AsyncClient) -> None:
        reply = await client.post("/generate/", content=content, headers={"content-type": "application/json"})
        assert code(reply) == (422, "E-SRV-16")

    with_app(tmp_path, body)


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b'{"n": ' + b"9" * 5_000 + b"}"])
def test_json_that_cannot_be_read_is_4xx(tmp_path: Path, content: bytes) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for method, path in PROTECTED:
            if method == "POST":
                reply = await client.post(path, content=content, headers={"content-type": "application/json"})
                assert reply.status_code in (400, 422), path
                ErrorBody.model_validate_json(reply.content)

    with_app(tmp_path, body)


class Overtaken(FakeEngine):
    """While it loads, somebody changes a file that was verified."""

    async def load_adapter(self, version: int, directory: Path) -> int:
        (directory / "adapter_model.safetensors").write_bytes(b"others")
        return await super().load_adapter(version, directory)

    async def load_weights(self, version: int, directory: Path) -> int:
        (directory / "model.safetensors").write_bytes(b"others")
        return await super().load_weights(version, directory)


@pytest.mark.parametrize("kind", ["adapter", "weights"])
@pytest.mark.parametrize("engine", [FakeEngine, Overtaken])
def test_a_file_swapped_after_it_was_hashed_is_never_served(
    tmp_path: Path, kind: Kind, engine: type[FakeEngine]
) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        path = {"adapter": "/set_lora_adapter/", "weights": "/set_weights/"}[kind]
        version = {"run_id": RUN, "version": 1, "manifest_sha256": publish(tmp_path / "sync", kind)}
        reply = await client.post(path, json=version)
        request = {"request_id": "r", "adapter_version": 1, "prompts": [[1]], "sampling": {"max_tokens": 1}}
        answer = await client.post("/generate/", json=request)
        if engine is FakeEngine:
            assert (reply.status_code, answer.status_code) == (200, 200)
        else:
            assert code(reply) == (409, "E-SYN-02") and "changed while" in reply.text
            assert code(answer) == (409, "E-SRV-13")

    with_app(tmp_path, body, engine)


def publish(sync_dir: Path, kind: Kind) -> str:
    if kind == "adapter":
        return publish_fake(sync_dir, RUN, 1)
    directory = sync_dir / "weights" / RUN / "v1"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    return write_manifest(directory, version=1, kind="weights")
