"""Models and engines that several integration tests share."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from axolotl.cli import train as train_command
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.serving.app import ServerState, build_app
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.http_server import http_server
from axolotl.serving.server_file import ServerFile, write_server_file
from tests.support.adapters import publish_other_weights, publish_random
from tests.support.live_server import TOKEN, LiveServer
from tests.support.loop_thread import LoopThread
from tests.support.project import make_project
from tests.support.protocol_suite import Subject
from tests.support.running_engine import RunningEngine
from tests.support.tiny_model import make_random_adapter, make_tiny_model


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


@pytest.fixture
def sync_project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a run of four steps that sends adapters to a server with the sync directory `sync`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_project(
        tmp_path,
        tiny_model,
        trl__use_vllm=True,
        trl__vllm_lora_sync=True,
        vllm__sync_dir=str(tmp_path / "sync"),
        max_steps=4,
    )
    (tmp_path / "sync").mkdir()
    return tmp_path


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[AxolotlGRPOTrainer]:
    """Those that `main` builds."""
    built: list[AxolotlGRPOTrainer] = []
    build = train_command._build

    def noted(*args: Any) -> AxolotlGRPOTrainer:
        built.append(build(*args))
        return built[-1]

    monkeypatch.setattr(train_command, "_build", noted)
    return built


def vllm_settings(model: Path) -> EngineSettings:
    return EngineSettings(
        model=str(model),
        revision=None,
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_lora_rank=6,
        max_loras=3,
        kv_cache_bytes=64 << 20,
    )


@contextmanager
def running_vllm(settings: EngineSettings) -> Iterator[RunningEngine]:
    """A vLLM engine of its own; starting one takes most of a minute."""
    from axolotl.serving.engines.vllm import VLLMEngine

    loop = LoopThread()
    try:
        engine = loop.run(VLLMEngine.create(settings), timeout_s=600)
        try:
            yield RunningEngine(engine, loop, settings)
        finally:
            loop.run(engine.close())
    finally:
        loop.close()


@pytest.fixture(scope="session")
def shared_vllm(tiny_model: Path) -> Iterator[RunningEngine]:
    """The one engine of all vLLM tests that do not harm it, as the test before left it."""
    with running_vllm(vllm_settings(tiny_model)) as running:
        yield running


@pytest.fixture
def vllm_engine(shared_vllm: RunningEngine) -> RunningEngine:
    """The shared engine with the base model's weights, no adapters and empty caches."""
    shared_vllm.loop.run(shared_vllm.engine.reset())
    return shared_vllm


@pytest.fixture(scope="module")
def vllm_subject(
    shared_vllm: RunningEngine, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """A server over the shared engine."""
    sync_dir = tmp_path_factory.mktemp("sync")
    shared_vllm.loop.run(shared_vllm.engine.reset())
    with serve_on_loop(shared_vllm, sync_dir) as server:
        yield Subject(
            server=server,
            fingerprint=shared_vllm.engine.fingerprint,
            max_model_len=shared_vllm.engine.max_model_len,
            publish=lambda run_id, version: publish_random(sync_dir, run_id, version, tiny_model),
            publish_weights=lambda run_id, version: publish_other_weights(sync_dir, run_id, version),
            tolerance=1e-3,
        )


@contextmanager
def serve_on_loop(running: RunningEngine, sync_dir: Path) -> Iterator[LiveServer]:
    """The app over an engine that lives already, on the engine's own loop."""
    state = ServerState(instance_id="instance-vllm", token=TOKEN, sync_dir=sync_dir, max_held=3)
    state.ready(running.engine)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = http_server(build_app(state))

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
