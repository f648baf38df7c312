"""`axolotl vllm-stop`: which server it finds, what it says, and that it touches nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from axolotl.cli.invocation import parse
from axolotl.cli.main import main
from axolotl.cli.vllm_stop import managed_by
from axolotl.errors import ConfigError
from axolotl.serving.server_file import ServerFile, read_server_file, write_server_file
from tests.support.disturbed import wait_until
from tests.unit.cli.conftest import MINIMAL

SLEEP = [sys.executable, "-S", "-c", "print('up', flush=True); import time; time.sleep(600)"]

# A run that starts a server which takes no SIGTERM, and says which processes they are.
RUN = """
import sys, time
from pathlib import Path
from axolotl.serving.process import start_group
deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
print(start_group([sys.executable, "-S", "-c", deaf], Path(sys.argv[1]), None).pid, flush=True)
time.sleep(600)
"""


class Sleepers:
    """Processes that stand for servers, each with its `server.json`."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, directory: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(SLEEP, stdout=subprocess.PIPE, text=True)
        self._started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        started = psutil.Process(process.pid).create_time()
        url = "http://127.0.0.1:9"
        write_server_file(
            directory, ServerFile(url=url, pid=process.pid, started=started, instance_id="i", token="secret")
        )
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def sleepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleepers]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = Sleepers()
    yield made
    made.close()


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".cache" / "axolotl" / "servers"


@pytest.mark.parametrize(("arguments", "port"), [([], "8000"), (["--port", "8123"], "8123"), (["--port=8123"], "8123")])
def test_the_server_of_a_port_is_stopped_and_no_other(
    sleepers: Sleepers, servers: Path, arguments: list[str], port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    meant, other = sleepers.start(servers / port), sleepers.start(servers / "9999")
    assert main(["vllm-stop", *arguments]) == 0
    out = capsys.readouterr().out
    assert out == f"stopped the server at http://127.0.0.1:9 (pid {meant.pid})\n"
    assert meant.wait(10) != 0 and other.poll() is None
    assert read_server_file(servers / port) is None and read_server_file(servers / "9999") is not None


def test_the_server_of_a_config(sleepers: Sleepers, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(MINIMAL + f"vllm:\n  sync_dir: {tmp_path / 'sync'}\n")
    meant = sleepers.start(tmp_path / "sync")
    assert main(["vllm-stop", str(config)]) == 0
    assert meant.wait(10) != 0


def test_the_port_of_a_config(sleepers: Sleepers, servers: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(MINIMAL)
    meant, other = sleepers.start(servers / "8123"), sleepers.start(servers / "8000")
    assert main(["vllm-stop", str(config), "--vllm.port", "8123"]) == 0
    assert meant.wait(10) != 0 and other.poll() is None


def test_no_server(sleepers: Sleepers, servers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-stop"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("ERROR E-ENV-10") and str(servers / "8000") in error


def test_a_pid_that_belongs_to_another_process_by_now(
    sleepers: Sleepers, servers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bystander = sleepers.start(servers / "8000")
    found = read_server_file(servers / "8000")
    assert found is not None
    write_server_file(servers / "8000", found.model_copy(update={"started": found.started - 100}))
    assert main(["vllm-stop"]) == 3
    assert f"left of pid {bystander.pid}, which is gone" in capsys.readouterr().err
    assert bystander.poll() is None


def test_a_managed_server_is_told_to_come_back(
    sleepers: Sleepers, servers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sleepers.start(servers / "8000")
    monkeypatch.setattr("axolotl.cli.vllm_stop.managed_by", lambda server: os.getpid())
    assert main(["vllm-stop"]) == 0
    assert f"the training run with pid {os.getpid()}, which starts it again" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_dead_run_has_left_is_ended_with_its_stopped_launcher(
    servers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    log = tmp_path / "log"
    run = subprocess.Popen([sys.executable, "-c", RUN, str(log)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    launcher = psutil.Process(int(run.stdout.readline()))
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "the server")
    server = psutil.Process(int(log.read_text()))
    content = ServerFile(
        url="http://127.0.0.1:9", pid=server.pid, started=server.create_time(), instance_id="i", token="secret"
    )
    write_server_file(servers / "8000", content)
    assert managed_by(content) == run.pid
    run.kill()
    run.communicate()
    # Within the five seconds that the launcher gives the server.
    os.killpg(launcher.pid, signal.SIGSTOP)
    wait_until(lambda: launcher.status() == psutil.STATUS_STOPPED, "the launcher stopped")
    assert managed_by(content) is None
    assert main(["vllm-stop"]) == 0
    # The launcher's own child, which would have killed the group, is gone with it.
    assert capsys.readouterr().out.startswith(f"stopped the server at http://127.0.0.1:9 (pid {server.pid} and 1 child")
    _, alive = psutil.wait_procs([launcher, server], timeout=0)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
    assert read_server_file(servers / "8000") is None


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--port"], "--port wants a port"),
        (["--port", "eighty"], "--port wants a port"),
        (["--port", "0"], "--port wants a port"),
        (["c.yaml", "--port", "8000"], "not both"),
        (["--vllm.port", "8000"], "none is given"),
    ],
)
def test_what_it_does_not_take(arguments: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse(["vllm-stop", *arguments])
