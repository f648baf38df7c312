"""The real app on a real socket, in a thread of the test process, over whatever engine the test brings."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from axolotl.serving.app import ServerState, build_app
from axolotl.serving.client import ServerClient
from axolotl.serving.engines.protocol import Engine
from axolotl.serving.http_server import http_server
from axolotl.serving.server_file import ServerFile, write_server_file

TOKEN = "test-token"
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class LiveServer:
    """A server that answers. sync_dir holds its `server.json` unless `token` is given by other means."""

    url: str
    token: str
    sync_dir: Path
    state: ServerState | None = None

    def client(self, timeout_s: float = 60.0) -> ServerClient:
        """One that waits a tenth of a second at most: nothing here takes longer to come about."""
        return ServerClient(
            self.url,
            self.sync_dir,
            timeout_s,
            transport=httpx.HTTPTransport(verify=False),
            sleep=lambda seconds: time.sleep(min(seconds, 0.1)),
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}


@contextmanager
def live_server(
    sync_dir: Path,
    create_engine: Callable[[], Awaitable[Engine]] | None,
    *,
    instance_id: str = "instance-1",
    max_held: int = 3,
    port: int = 0,
) -> Iterator[LiveServer]:
    """Serve until the block ends, on a free port unless one is given.

    `create_engine` runs on the server's event loop; None leaves it loading for ever.
    """
    state = ServerState(instance_id=instance_id, token=TOKEN, sync_dir=sync_dir, max_held=max_held)
    listener = socket.create_server(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = http_server(build_app(state))
    answered = threading.Event()
    problems: list[BaseException] = []

    async def run() -> None:
        engine = await create_engine() if create_engine is not None else None
        if engine is not None:
            state.ready(engine)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        answered.set()
        await serving
        if engine is not None:
            await engine.close()

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as problem:
            problems.append(problem)
            answered.set()

    thread = threading.Thread(target=work, name="live-server")
    thread.start()
    try:
        assert answered.wait(START_TIMEOUT_S)
        if problems:
            raise problems[0]
        write_server_file(sync_dir, ServerFile(url=url, pid=1, started=0.0, instance_id=instance_id, token=TOKEN))
        yield LiveServer(url, TOKEN, sync_dir, state)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()
