"""HTTP requests that are almost right: seeded, as the bytes that go over the wire."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from axolotl.serving.processes import own_namespace

RUN = "run-0123456789ab"
METHODS = ["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "post", "PROPFIND", "G" * 200]
PATHS = [
    "//generate/",
    "/generate//",
    "/generate/..",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/..%2f..%2fetc%2fpasswd",
    "/generate%00/",
    "/generate/%",
    "/%ff%fe/",
    "/GENERATE/",
    "/generate/?token=x&" + "a=b&" * 200,
    "/generate/#x",
    "/" + "a" * 4096,
    "http://example.invalid/generate/",
    "*",
    "/docs",
    "/openapi.json",
    "/v1/load_lora_adapter",
    "/collective_rpc",
    "/set_lora_adapter/../generate/",
    "/．．/",
]
IDS = [
    "../x",
    "/etc",
    "~root",
    "%2e%2e",
    "a\0b",
    "．．",
    "a" * 4096,
    "",
    ".",
    "run-0123456789ab/../run",
    "RUN",
    "run\n",
    "\ud800",
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64 + 1,
    10**400,
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "1",
    "x" * 10_000,
    "\ud800",
    "\0\x1b[31m\r\n",
    [],
    {},
    [[]],
    [None],
    [[1, "a"]],
    {"a": {"b": []}},
    [[0] * 5_000],
]
RAW_JSON = [
    b"",
    b"null",
    b"[]",
    b'"',
    b"{",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\xef\xbb\xbf{}",
    '{"a": 1}'.encode("utf-16"),
    b'{"n": ' + b"9" * 5_000 + b"}",
    b'{"n": 1e999}',
    b'{"n": -Infinity}',
    b'{"\xff": 1}',
    b"\x00",
    b"\x80\x04\x95K\x01.",
]

GARBAGE = [b"\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc", b"GET\r\n\r\n", b"\0" * 99]


@dataclass(frozen=True)
class Request:
    """kind: which mutation made it. raw: what is sent. is_whole: whether the server is owed an answer, which a request
    that breaks off is not. method: decides whether the answer has a body."""

    kind: str
    method: str
    raw: bytes
    is_whole: bool = True


@dataclass
class Valid:
    """A request that the server understands. body None: a GET."""

    path: str
    body: Any
    headers: dict[str, str] = field(default_factory=dict)


class Generator:
    """An endless, reproducible stream of requests.

    Args:
        token: the right one. fingerprint: what `/server_info/` says. publish: makes an adapter version and returns its
            digest; without it no adapter is ever loaded.
    """

    def __init__(
        self, seed: int, token: str, fingerprint: dict[str, Any], publish: Callable[[str, int], str] | None
    ) -> None:
        self._random = random.Random(seed)
        self._token = token
        self._fingerprint = fingerprint
        self._publish = publish
        self._digests: dict[int, str] = {}

    def next(self) -> Request:
        valid = self._valid()
        return self._random.choices(
            [
                self._as_it_is,
                self._with_other_values,
                self._with_other_bytes,
                self._with_other_headers,
                self._elsewhere,
            ],
            [3, 10, 3, 3, 2],
        )[0](valid)

    # Requests that are right

    def _valid(self) -> Valid:
        make = self._random.choice(
            [
                self._generate,
                self._generate,
                self._score,
                self._session,
                self._adapter,
                self._weights,
                self._link,
                self._transfer,
                self._clear,
            ]
            + [lambda: Valid(f"/{self._random.choice(['health', 'server_info', 'progress', 'metrics'])}/", None)]
        )
        return make()

    def _ids(self, low: int, high: int) -> list[int]:
        return [self._random.randrange(3, 300) for _ in range(self._random.randint(low, high))]

    def _generate(self) -> Valid:
        prompts = [self._ids(1, 6) for _ in range(self._random.randint(1, 3))]
        n = self._random.randint(1, 3)
        body = {
            "request_id": uuid.UUID(int=self._random.getrandbits(128)).hex,
            "adapter_version": self._random.choice([0, 0, *self._digests]),
            "prompts": prompts,
            "sampling": {
                "n": n,
                "max_tokens": self._random.randint(1, 6),
                "temperature": self._random.choice([0.0, 0.5, 1.0]),
                "top_p": self._random.choice([1.0, 0.9]),
                "top_k": self._random.choice([0, 5]),
                "min_p": 0.0,
                "repetition_penalty": self._random.choice([1.0, 1.2]),
                "extra": self._random.choice([{}, {"ignore_eos": True}, {"min_tokens": 1}, {"stop_token_ids": [5]}]),
            },
            "seeds": [[self._random.getrandbits(40) for _ in range(n)] for _ in prompts],
            "run_id": self._random.choice([None, RUN]),
            "stream": self._random.random() < 0.3,
        }
        return Valid("/generate/", body)

    def _score(self) -> Valid:
        valid = self._generate()
        valid.body |= {"score_ids": [self._ids(1, 5) for _ in valid.body["prompts"]], "seeds": None, "stream": False}
        return valid

    def _session(self) -> Valid:
        action = self._random.choice(["claim", "claim", "renew", "release"])
        body = {
            "run_id": RUN,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "namespace": own_namespace(),
            "fingerprint": copy.deepcopy(self._fingerprint),
            "action": action,
        }
        if action == "claim":
            self._digests.clear()
        return Valid("/session/", body)

    def _adapter(self) -> Valid:
        version = self._random.randint(1, 4)
        if self._publish is not None and version not in self._digests:
            self._digests[version] = self._publish(RUN, version)
        digest = self._digests.get(version, "0" * 64)
        return Valid("/set_lora_adapter/", {"run_id": RUN, "version": version, "manifest_sha256": digest})

    def _weights(self) -> Valid:
        return Valid("/set_weights/", {"run_id": RUN, "version": 1, "manifest_sha256": "0" * 64})

    def _link(self) -> Valid:
        action = self._random.choice(["join", "leave"])
        return Valid("/link_weights/", {"run_id": RUN, "unique_id": "A" * 171 + "=", "action": action})

    def _transfer(self) -> Valid:
        body = {
            "run_id": RUN,
            "version": 1,
            "sha256": "0" * 64,
            "tensors": [{"name": "model.norm.weight", "dtype": "float32", "shape": [8]}],
            "action": self._random.choice(["check", "receive"]),
        }
        return Valid("/receive_weights/", body)

    def _clear(self) -> Valid:
        return Valid("/clear_lora_adapter/", {"run_id": RUN})

    # What is done to them

    def _as_it_is(self, valid: Valid) -> Request:
        return self._request("valid", valid)

    def _with_other_values(self, valid: Valid) -> Request:
        if not isinstance(valid.body, dict) or not valid.body:
            return self._with_other_bytes(valid)
        for _ in range(self._random.choice([1, 1, 2])):
            self._replace_one(valid.body)
        return self._request("values", valid)

    def _replace_one(self, body: Any) -> None:
        """Change one entry somewhere in it: another value, none, one more, or its own twice."""
        places: list[tuple[Any, Any]] = []
        waiting = [body]
        while waiting:
            item = waiting.pop()
            for key in list(item) if isinstance(item, dict) else range(len(item)):
                places.append((item, key))
                if isinstance(item[key], dict | list):
                    waiting.append(item[key])
        if not places:
            return
        item, key = self._random.choice(places)
        match self._random.randrange(6):
            case 0:
                del item[key]
            case 1 if isinstance(item, dict):
                item[self._random.choice(["extra_key", "", "__class__", "\ud800", "a" * 5_000])] = 1
            case 2 if isinstance(item, list):
                item += item[:]
            case 3 if key == "run_id":
                item[key] = self._random.choice(IDS)
            case 4:
                nested: Any = 1
                for _ in range(self._random.choice([5, 50, 300])):
                    nested = [nested]
                item[key] = nested
            case _:
                item[key] = copy.deepcopy(self._random.choice(VALUES + IDS))

    def _with_other_bytes(self, valid: Valid) -> Request:
        if self._random.random() < 0.5 or valid.body is None:
            body = self._random.choice(RAW_JSON)
        else:
            body = bytearray(_dumps(valid.body))
            for _ in range(self._random.randint(1, 4)):
                position = self._random.randrange(len(body) or 1)
                match self._random.randrange(3):
                    case 0:
                        body[position : position + 1] = bytes([self._random.randrange(256)])
                    case 1:
                        del body[position:]
                    case _:
                        body[position:position] = self._random.choice([b"\0", b"NaN", b"[", b'"', b",", b"\xc3"])
                body = body or bytearray(b" ")
        path = valid.path if valid.body is not None else "/generate/"
        return self._request("bytes", Valid(path, None), method="POST", body=bytes(body))

    def _with_other_headers(self, valid: Valid) -> Request:
        body = b"" if valid.body is None else _dumps(valid.body)
        method = "GET" if valid.body is None else "POST"
        changes: list[dict[str, str | None]] = [
            {"authorization": None},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer " + "x" * 9_000},
            {"authorization": self._token},
            {"authorization": "Bearer \xe9\xff"},
            {"content-type": "text/plain"},
            {"content-type": None},
            {"content-type": "application/json; charset=utf-7"},
            {"origin": "http://evil.example"},
            {"host": "evil.example"},
            {"host": None},
            {"host": ""},
            {"content-encoding": "gzip"},
            {"content-length": "-1"},
            {"content-length": "1e3"},
            {"content-length": "9" * 30},
            {"content-length": str(40_000_000)},
            {"content-length": str(max(0, len(body) - 3))},
            {"transfer-encoding": "chunked"},
            {"x-large": "x" * 20_000},
            {"x-larger": "x" * 70_000},
            {"x-control": "a\x00b"},
            {"expect": "100-continue"},
            {"upgrade": "websocket", "connection": "upgrade"},
            {"x y": "z"},
        ]
        change = self._random.choice(changes)
        if "content-encoding" in change:
            body = gzip.compress(body or b" " * 1_000_000)
        # Headers past what is parsed at all, and a body that is not in chunks: the connection may be closed at once.
        is_cut = "x-larger" in change or "transfer-encoding" in change
        return self._request("headers", valid, method=method, body=body, headers=change, is_whole=not is_cut)

    def _elsewhere(self, valid: Valid) -> Request:
        match self._random.randrange(4):
            case 0:
                return self._request("method", valid, method=self._random.choice(METHODS))
            case 1:
                return self._request("path", Valid(self._random.choice(PATHS), valid.body))
            case 2:
                raw = self._request("cut", valid).raw
                return Request("cut", "POST", raw[: self._random.randrange(1, len(raw))], is_whole=False)
            case _:
                garbage = self._random.choice(
                    [b"\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc", b"GET\r\n\r\n", b"\0" * 99]
                )
                return Request("garbage", "GET", garbage, is_whole=False)

    def _request(
        self,
        kind: str,
        valid: Valid,
        *,
        method: str | None = None,
        body: bytes | None = None,
        headers: dict[str, str | None] | None = None,
        is_whole: bool = True,
    ) -> Request:
        if body is None:
            body = b"" if valid.body is None else _dumps(valid.body)
        if method is None:
            method = "GET" if valid.body is None else "POST"
        fields: dict[str, str | None] = {
            "host": "127.0.0.1",
            "authorization": f"Bearer {self._token}",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **(headers or {}),
        }
        lines = [f"{method} {valid.path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items() if v is not None), "", ""]
        return Request(kind, method, "\r\n".join(lines).encode("utf-8") + body, is_whole)


def _dumps(body: Any) -> bytes:
    """`json.dumps` writes NaN and Infinity as such, and half a surrogate pair as its escape: both are wanted."""
    return json.dumps(body).encode()
