"""`axolotl vllm-serve`: bind the port, answer `/health/`, load the engine, serve until told to stop.

bind ─► server.json ─► uvicorn ─► (in the background) choose and load the engine ─► ready ─► engine died: exit code 6
                          └─ SIGINT/SIGTERM ─► finish requests ─► close the engine ─► tidy the sync directory
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from axolotl.errors import AxolotlError, EnvironmentFault, ServerError
from axolotl.loaders.refusals import OWN_CODE_DO, OWN_CODE_WHY, needs_own_code
from axolotl.scripts.serve_settings import choose_engine, engine_settings, max_adapters, without_effect
from axolotl.serving.app import ServerState, build_app
from axolotl.serving.engines.protocol import Engine, EngineName, EngineSettings
from axolotl.serving.http_server import http_server
from axolotl.serving.ports import bind
from axolotl.serving.run_directories import RunDirectories
from axolotl.serving.server_file import ServerFile, new_token, read_server_file, remove_server_file, write_server_file
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.hosts import ANY_ADDRESS, LOOPBACK, client_address
from axolotl.utils.schemas.plan import sync_dir

FAILED_LINGER_S = 5.0
DIED_LINGER_S = 1.0
GRACEFUL_SHUTDOWN_S = 10
LOAD_STOP_S = 10.0
CLOSE_S = 30.0


def main(config: AxolotlConfig, base_dir: Path) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: resolved.
        base_dir: the config's directory; a relative `base_model` is also looked for there.

    Raises:
        EnvironmentFault: the port is taken, another server uses the same `sync_dir`, or the engine does not start.
        ServerError: `E-SRV-20` the engine died or broke while it served; a new process is needed.
        ConfigError: the model's own config contradicts ours.
    """
    assert config.vllm.port is not None, "resolve() fills vllm.port"
    share_cores(config.vllm.engine, os.environ)
    host = config.vllm.host or LOOPBACK
    with bind(host, config.vllm.port) as listener:
        url = f"http://{client_address(host)}:{listener.getsockname()[1]}"
        directory = sync_dir(config).absolute()
        state = ServerState(
            instance_id=secrets.token_hex(8), token=new_token(), sync_dir=directory, max_held=max_adapters(config)
        )
        server = _Server(config, base_dir, state, listener)
        with _stopped_by_signals(server):
            _publish(state, url)
            try:
                _announce(host, url, directory)
                server.run()
            finally:
                remove_server_file(directory, state.instance_id)


def share_cores(engine: str, environment: MutableMapping[str, str]) -> None:
    """Let idle OpenMP threads sleep instead of spin: read when torch is loaded, so it must be set before.

    Spinning threads of this process and of the trainer on the same cores slow each other down several times. vLLM
    binds its own threads and is left alone.
    """
    if engine != "vllm":
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _publish(state: ServerState, url: str) -> None:
    """Write `server.json`, unless a server that lives has one in the same place."""
    other = read_server_file(state.sync_dir)
    if other is not None and other.is_alive():
        raise EnvironmentFault(
            f"another server uses {state.sync_dir}",
            code="E-ENV-04",
            why=f"pid {other.pid} serves {other.url} with it",
            do="stop it, or give this server its own vllm.sync_dir",
        )
    started = psutil.Process().create_time()
    write_server_file(
        state.sync_dir,
        ServerFile(url=url, pid=os.getpid(), started=started, instance_id=state.instance_id, token=state.token),
    )


def _announce(host: str, url: str, directory: Path) -> None:
    _say(f"axolotl server on {url} (token and adapters in {directory})")
    if host in ANY_ADDRESS:
        print(
            "WARNING vllm.host makes this server reachable from every network of this machine, without encryption.\n"
            "        Whoever has the token can generate and load adapters; leave vllm.host out to stay on loopback.",
            file=sys.stderr,
            flush=True,
        )


@dataclass
class _Server:
    """One run of uvicorn with the engine loading behind it."""

    config: AxolotlConfig
    base_dir: Path
    state: ServerState
    listener: socket.socket
    engine: Engine | None = None
    problem: AxolotlError | None = None

    def __post_init__(self) -> None:
        self._http = http_server(build_app(self.state), graceful_shutdown_s=GRACEFUL_SHUTDOWN_S)

    def stop(self) -> None:
        """Stop serving, or not begin it."""
        self._http.should_exit = True

    def run(self) -> None:
        """Returns after a clean stop, raises when the engine did not start or died."""
        asyncio.run(self._serve())
        if self.problem is not None:
            raise self.problem

    async def _serve(self) -> None:
        background = asyncio.create_task(self._load_and_watch())
        await self._http.serve(sockets=[self.listener])
        background.cancel()
        _, unfinished = await asyncio.wait([background], timeout=LOAD_STOP_S)
        is_closed = await self._close_engine()
        await asyncio.to_thread(RunDirectories(self.state.sync_dir).clean)
        if unfinished or not is_closed or (self.engine is None and self.problem is None):
            # A model that is being read into memory cannot be interrupted, and a normal exit would wait for it.
            self._exit_now()

    async def _close_engine(self) -> bool:
        """Whether nothing of the engine is left that an exit would wait for."""
        if self.engine is None:
            return True
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.engine.close()
        except TimeoutError:
            return False
        return True

    def _exit_now(self) -> NoReturn:
        remove_server_file(self.state.sync_dir, self.state.instance_id)
        if self.problem is not None:
            print(self.problem.report(), file=sys.stderr, flush=True)
        os._exit(self.problem.exit_code if self.problem is not None else 0)

    async def _load_and_watch(self) -> None:
        """Bring the engine up and wait for its death; both failures stay on `/health/` for a moment, then it stops."""
        started = time.monotonic()
        try:
            name, settings = await self._choose()
            self.state.loading(f"loading {Path(settings.model).name}")
            self.engine = await create_engine(name, settings)
        except Exception as error:
            self.problem = start_failure(error)
            await self._fail(self.problem.why or self.problem.what, FAILED_LINGER_S)
            return
        self.state.ready(self.engine)
        _say(f"ready after {time.monotonic() - started:.1f} s (instance {self.state.instance_id})")
        reason = await end_of(self.engine, self.state)
        self.problem = ServerError(
            "the engine can no longer serve", code="E-SRV-20", why=reason, do="start the server again"
        )
        await self._fail(reason, DIED_LINGER_S)

    async def _fail(self, reason: str, linger_s: float) -> None:
        self.state.failed(reason)
        await asyncio.sleep(linger_s)
        self.stop()

    async def _choose(self) -> tuple[EngineName, EngineSettings]:
        self.state.loading("looking at the devices")
        choice = await asyncio.to_thread(choose_engine, self.config)
        settings = await asyncio.to_thread(engine_settings, self.config, choice, self.base_dir)
        _say(f"engine: {choice.name} ({choice.reason}); {settings.model} in {settings.dtype} on {choice.device}")
        for line in without_effect(self.config, choice.name):
            _say(line)
        return choice.name, settings


async def end_of(engine: Engine, state: ServerState) -> str:
    """Returns, with the reason, once the engine died, or broke in the hands of the app."""
    died = asyncio.ensure_future(engine.died())
    broken = asyncio.ensure_future(state.broken.wait())
    try:
        await asyncio.wait({died, broken}, return_when=asyncio.FIRST_COMPLETED)
        return state.health.phase if state.broken.is_set() else died.result()
    finally:
        died.cancel()
        broken.cancel()


async def create_engine(name: EngineName, settings: EngineSettings) -> Engine:
    """The engine, loaded and ready. Each is imported only when it is the one."""
    if name == "vllm":
        from axolotl.serving.engines.vllm import VLLMEngine

        return await VLLMEngine.create(settings)
    from transformers.utils import logging

    from axolotl.serving.engines.transformers import TransformersEngine

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return await TransformersEngine.create(settings)


def start_failure(error: Exception) -> AxolotlError:
    """One line for whatever kept the engine from starting."""
    if isinstance(error, AxolotlError):
        return error
    if needs_own_code(error):
        return EnvironmentFault("the engine failed to start", code="E-ENV-05", why=OWN_CODE_WHY, do=OWN_CODE_DO)
    lines = str(error).strip().splitlines()
    return EnvironmentFault(
        "the engine failed to start",
        code="E-ENV-05",
        why=f"{type(error).__name__}: {lines[0] if lines else 'no message'}",
        do="correct what the line above names, and start the server again",
    )


def _say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _stopped_by_signals(server: _Server) -> Iterator[None]:
    """SIGINT and SIGTERM stop the server, from before it serves (uvicorn has its own handlers only while it does) until
    it has cleaned up."""

    def stop(_: int, __: FrameType | None) -> None:
        server.stop()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
