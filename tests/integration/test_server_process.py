"""`axolotl vllm-serve` as a process of its own: start, stop, and the ways it can fail; and as a managed server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from axolotl.errors import EnvironmentFault
from axolotl.serving.client import ServerClient
from axolotl.serving.server_file import read_server_file, read_token
from axolotl.serving.supervisor import ManagedServer, serve_command
from tests.support.protocol_suite import generate_request
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.integration

READY_S = 100.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def write_config(tmp_path: Path, model: Path, port: int) -> Callable[..., Path]:
    def write(**options: object) -> Path:
        config = {
            "base_model": str(model),
            "rl": "grpo",
            "adapter": "lora",
            "output_dir": str(tmp_path / "out"),
            "micro_batch_size": 8,
            "learning_rate": 1e-5,
            "vllm": {
                "port": port,
                "max_model_len": 128,
                "sync_dir": str(tmp_path / "sync"),
                "engine": "transformers",
                "device": "cpu",
                "enforce_eager": True,
            },
            "trl": {"use_vllm": True, "vllm_lora_sync": True, "max_completion_length": 16},
            **options,
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
def managed(tmp_path: Path, port: int) -> Callable[[Path], ManagedServer]:
    return lambda config: ManagedServer(
        serve_command(config),
        url=f"http://127.0.0.1:{port}",
        sync_dir=tmp_path / "sync",
        log_path=tmp_path / "out" / "server.log",
    )


@pytest.fixture
def client(tmp_path: Path, port: int) -> Iterator[ServerClient]:
    with ServerClient(f"http://127.0.0.1:{port}", tmp_path / "sync", READY_S) as client:
        yield client


def watch(server: ManagedServer) -> None:
    """Until it ends."""
    while True:
        server.check_alive()
        time.sleep(0.05)


@contextlib.contextmanager
def serving(config: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """The command as a user runs it, past its first line; stopped with SIGTERM when the block has not done so."""
    process = subprocess.Popen(
        serve_command(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        assert process.stdout is not None
        assert "axolotl server on" in process.stdout.readline()
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def ends_within(pid: int, seconds: float) -> bool:
    """Whether the process is gone, or only waiting to be reaped, before `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


def test_a_managed_server_serves_and_is_gone_afterwards(
    write_config: Callable[..., Path],
    managed: Callable[[Path], ManagedServer],
    client: ServerClient,
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    with managed(write_config()) as server:
        info = server.wait_ready(client, lines.append)
        pid = server.pid
        assert info.engine == "transformers" and info.max_model_len == 128
        found = read_server_file(tmp_path / "sync")
        assert found is not None and found.instance_id == info.instance_id
        assert pid is not None and os.getpgid(found.pid) == pid != os.getpgid(0)
        assert lines and "waiting for the server" in lines[0]
    assert not psutil.pid_exists(pid)
    assert read_server_file(tmp_path / "sync") is None, "a clean stop removes it"
    log = (tmp_path / "out" / "server.log").read_text()
    assert "engine: transformers (vllm.engine: transformers)" in log and "ready after" in log
    assert log.count("vllm.enforce_eager has no effect with the transformers engine") == 1
    assert "\r" not in log, "no progress bars in a file"
    assert "Traceback" not in log and found.token not in log
    server.stop()


def test_a_server_that_cannot_start_is_reported_at_once_with_its_last_lines(
    write_config: Callable[..., Path], managed: Callable[[Path], ManagedServer], client: ServerClient, tmp_path: Path
) -> None:
    with managed(write_config(base_model=str(tmp_path / "no-model"))) as server:
        with pytest.raises(EnvironmentFault) as problem:
            watch(server)
        assert problem.value.code == "E-ENV-05" and "exit code 3" in problem.value.what
    text = "\n".join(problem.value.details)
    assert "cannot find the model" in text and "Traceback" not in text


def test_a_failed_start_is_on_health_before_the_server_exits(
    write_config: Callable[..., Path], client: ServerClient, managed: Callable[[Path], ManagedServer], tmp_path: Path
) -> None:
    with managed(write_config(base_model=str(tmp_path / "no-model"))), pytest.raises(Exception) as problem:
        client.wait_ready()
    assert problem.value.code == "E-SRV-18" and "no directory" in problem.value.why


def test_a_taken_port_is_one_error(
    write_config: Callable[..., Path], managed: Callable[[Path], ManagedServer], port: int
) -> None:
    config = write_config()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(EnvironmentFault, match=f"port {port} is in use by pid {os.getpid()}"):
            managed(config).start()
        done = subprocess.run(serve_command(config), capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr.splitlines()[0].startswith(f"ERROR E-ENV-02  port {port} is in use by pid {os.getpid()}")
    assert "Traceback" not in done.stderr


RUNNER = """
import sys
from pathlib import Path
from axolotl.serving.supervisor import ManagedServer
command = [sys.executable, "-c", "import time; time.sleep(600)"]
server = ManagedServer(command, url="http://127.0.0.1:0", sync_dir=Path("."), log_path=Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.readline()
"""


def test_the_server_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    """The server is a stand-in that sleeps: what ends it is the parent-death signal."""
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    pid = int(runner.stdout.readline())
    assert psutil.pid_exists(pid)
    runner.kill()
    runner.communicate()
    assert ends_within(pid, 10)


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axolotl.serving.supervisor.TERMINATE_S", 0.5)
    stubborn = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    server = ManagedServer([sys.executable, "-c", stubborn], url="http://127.0.0.1:0", sync_dir=tmp_path, log_path=log)
    with server:
        pid = server.pid
        assert pid is not None
        deadline = time.monotonic() + 30
        while not server.log_tail() and time.monotonic() < deadline:
            time.sleep(0.02)
        child = int(server.log_tail()[-1])
    assert ends_within(pid, 5) and ends_within(child, 5)


def test_sigterm_while_loading_ends_the_server_cleanly(write_config: Callable[..., Path], tmp_path: Path) -> None:
    with serving(write_config()) as process:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert (errors, process.returncode) == ("", 0)
    assert read_server_file(tmp_path / "sync") is None


def test_all_addresses_are_served_with_a_warning_of_two_lines(
    write_config: Callable[..., Path], tmp_path: Path, port: int
) -> None:
    config = yaml.safe_load(write_config().read_text())
    config["vllm"]["host"] = "0.0.0.0"
    with serving(write_config(vllm=config["vllm"])) as process:
        found = read_server_file(tmp_path / "sync")
        assert found is not None and found.url == f"http://127.0.0.1:{port}"
        assert httpx.get(f"{found.url}/server_info/").status_code == 401
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert len(errors.splitlines()) == 2 and errors.startswith("WARNING vllm.host")


def test_two_servers_do_not_share_a_sync_dir(write_config: Callable[..., Path], port: int) -> None:
    with serving(write_config()) as first:
        config = yaml.safe_load(write_config().read_text())
        with socket.create_server(("127.0.0.1", 0)) as probe:
            config["vllm"]["port"] = probe.getsockname()[1]
        second = write_config(vllm=config["vllm"])
        done = subprocess.run(serve_command(second), capture_output=True, text=True, timeout=60)
        assert done.returncode == 3
        assert done.stderr.startswith("ERROR E-ENV-04") and f"pid {first.pid}" in done.stderr


DYING = """
import asyncio, sys
from axolotl.cli.main import main
from axolotl.errors import ServerError
from axolotl.scripts import vllm_serve_lora
from tests.fakes.engine import FakeEngine

class Dying(FakeEngine):
    async def generate(self, *arguments):
        self.death.set_result("killed by signal 9")
        raise ServerError("the engine died", code="E-SRV-20")
        yield

    async def close(self):
        print("closed", flush=True)
        if HANGS:
            await asyncio.Event().wait()

async def create(name, settings):
    return Dying()

vllm_serve_lora.create_engine = create
vllm_serve_lora.CLOSE_S = 0.2
sys.argv = ["axolotl", "vllm-serve", CONFIG]
sys.exit(main())
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_the_death_of_the_engine_ends_the_server(
    write_config: Callable[..., Path], client: ServerClient, tmp_path: Path, port: int, hangs: bool
) -> None:
    """`/health/` says why for a moment, then the process ends so that whoever watches it can start another. An engine
    that cannot even be closed does not keep it."""
    program = DYING.replace("HANGS", repr(hangs)).replace("CONFIG", repr(str(write_config())))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        client.wait_ready()
        url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {read_token(tmp_path / 'sync')}"}
        answer = httpx.post(f"{url}/generate/", json=generate_request().model_dump(), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (500, "E-SRV-20")
        healths = []
        with contextlib.suppress(httpx.TransportError):
            while process.poll() is None:
                healths.append(httpx.get(f"{url}/health/").json())
        assert {"status": "failed", "phase": "killed by signal 9"} in healths
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert errors.splitlines() == [
        "ERROR E-SRV-20  the engine can no longer serve",
        "  why    killed by signal 9",
        "  do     start the server again",
    ]
    assert process.returncode == 6 and "closed" in output
    assert read_server_file(tmp_path / "sync") is None


def test_another_serve_module_is_run_with_the_resolved_config(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "their_server.py").write_text("import sys\nprint('THEIRS\\n' + open(sys.argv[1]).read())")
    config = yaml.safe_load(write_config().read_text())
    config["vllm"]["serve_module"] = "their_server"
    path = write_config(vllm=config["vllm"])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(serve_command(path), capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout.partition("THEIRS")[2])["vllm"]["serve_module"] == "their_server"
    missing = subprocess.run(serve_command(path), capture_output=True, text=True, timeout=60)
    assert missing.returncode == 3 and "there is no module their_server" in missing.stderr
