"""A scripted server, and clients of it that are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from axolotl.serving.client import ServerClient
from tests.fakes.server import ScriptedServer, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def connect(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ServerClient]]:
    """`connect(timeout_s, **options)`: a client past its handshake."""
    monkeypatch.delenv("AXOLOTL_SERVER_TOKEN", raising=False)
    with ExitStack() as stack:

        def connect(timeout_s: float = 20.0, **options: object) -> ServerClient:
            client = stack.enter_context(ServerClient(server.url, tmp_path, timeout_s, **options))  # type: ignore[arg-type]
            client.wait_ready()
            return client

        yield connect
