"""Models and engines that several integration tests share."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn

from axolotl.serving.app import ServerState, build_app
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.server_file import ServerFile, write_server_file
from tests.support.live_server import TOKEN, LiveServer
from tests.support.loop_thread import LoopThread
from tests.support.tiny_model import make_random_adapter, make_tiny_model

if TYPE_CHECKING:
    from axolotl.serving.engines.vllm import VLLMEngine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed; on a CPU: make install-vllm"
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two adapters of rank 8 with different random weights."""
    root = tmp_path_factory.mktemp("adapters")
    first, second = (make_random_adapter(tiny_model, root / f"v{seed}", seed=seed) for seed in (1, 2))
    return first, second


@dataclass(frozen=True)
class RunningEngine:
    """A vLLM engine, the loop it lives on, and what it was made from."""

    engine: VLLMEngine
    loop: LoopThread
    settings: EngineSettings


@pytest.fixture(scope="module")
def vllm_engine(tiny_model: Path) -> Iterator[RunningEngine]:
    """One vLLM engine a module: starting one takes most of a minute."""
    from axolotl.serving.engines.vllm import VLLMEngine

    settings = EngineSettings(
        model=str(tiny_model),
        revision=None,
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_lora_rank=6,
        max_loras=3,
        kv_cache_bytes=64 << 20,
    )
    loop = LoopThread()
    try:
        engine = loop.run(VLLMEngine.create(settings), timeout_s=600)
        try:
            yield RunningEngine(engine, loop, settings)
        finally:
            loop.run(engine.close())
    finally:
        loop.close()


@contextmanager
def serve_on_loop(running: RunningEngine, sync_dir: Path) -> Iterator[LiveServer]:
    """The app over an engine that lives already, on the engine's own loop."""
    state = ServerState(instance_id="instance-vllm", token=TOKEN, sync_dir=sync_dir, max_held=3)
    state.ready(running.engine)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(build_app(state), log_level="warning", lifespan="off"))

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(server.serve(sockets=[listener]))

    async def finish(serving: asyncio.Task[None]) -> None:
        await asyncio.wait_for(serving, 30)

    serving = running.loop.run(start())
    try:
        write_server_file(sync_dir, ServerFile(url=url, pid=1, started=0.0, instance_id=state.instance_id, token=TOKEN))
        yield LiveServer(url, TOKEN, sync_dir, state)
    finally:
        server.should_exit = True
        running.loop.run(finish(serving))
        listener.close()
