"""The server as a process, watched from outside: where it listens, whom it calls, and where its token is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from axolotl.serving.supervisor import serve_command
from axolotl.serving.wire import GenerateRequest, Sampling
from tests.campaigns.soak import RUN, free_port, run, served
from tests.support.live_server import LiveServer
from tests.support.tiny_model import make_random_adapter, make_tiny_model

pytestmark = pytest.mark.integration

# An audit hook sees what Python code does with sockets, whichever library it is in, and cannot be taken out again.
WATCH = """
import ipaddress, os, sys

def watch(event, arguments):
    if event == "socket.connect":
        address = arguments[1]
        if not isinstance(address, tuple) or ipaddress.ip_address(address[0]).is_loopback:
            return
    elif event == "socket.getaddrinfo":
        if arguments[0] in (None, "localhost", "127.0.0.1"):
            return
    elif event not in ("socket.gethostbyname", "socket.gethostbyaddr"):
        return
    with open(os.environ["CALLS_FILE"], "a") as file:
        file.write(f"{event} {arguments[1:] if event == 'socket.connect' else arguments}\\n")

sys.addaudithook(watch)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def watched_environment(directory: Path) -> dict[str, str]:
    """Ours, with the model hub switched on as it is for a user, and every call to another machine written down."""
    (directory / "hook").mkdir()
    (directory / "hook" / "sitecustomize.py").write_text(WATCH)
    offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    kept = {name: value for name, value in os.environ.items() if name not in offline}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(directory / "hook"),
        "CALLS_FILE": str(directory / "calls"),
    }


def test_the_hook_sees_a_call(tmp_path: Path) -> None:
    environment = watched_environment(tmp_path)
    code = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, timeout=60)
    assert "192.0.2.1" in (tmp_path / "calls").read_text()


def texts_below(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def score(server: LiveServer) -> httpx.Response:
    request = GenerateRequest(
        request_id="score", adapter_version=0, prompts=[[5, 6]], sampling=Sampling(max_tokens=1), score_ids=[[7, 8]]
    )
    return httpx.post(server.url + "/generate/", json=request.model_dump(), headers=server.headers, timeout=60)


def test_a_working_server_calls_nobody_listens_on_loopback_and_tells_its_token_to_nobody(
    tmp_path: Path, model: Path
) -> None:
    template = make_random_adapter(model, tmp_path / "template")
    environment = watched_environment(tmp_path)
    options = {"engine": "transformers", "device": "cpu"}
    with served(tmp_path, model, environment=environment, **options) as (server, process):
        report = run(server, process, template, num_syncs=3)
        assert not report.failures and report.num_answers > 0
        assert score(server).status_code == 200
        headers = {**server.headers, "content-type": "application/json"}
        assert httpx.post(server.url + "/generate/", content=b"\xff", headers=headers).status_code in (400, 422)
        family = [process, *process.children(recursive=True)]
        addresses = {
            each.laddr.ip
            for member in family
            for each in member.net_connections(kind="inet")
            if each.status == psutil.CONN_LISTEN
        }
        assert addresses == {"127.0.0.1"}
        assert all(server.token not in argument for member in family for argument in member.cmdline())
        token_file = server.sync_dir / "server.json"
        assert stat.S_IMODE(server.sync_dir.stat().st_mode) == 0o700
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        holders = {path for path, text in texts_below(tmp_path).items() if server.token.encode() in text}
        assert holders == {token_file}
        assert (server.sync_dir / "adapters" / RUN).is_dir()
    calls = tmp_path / "calls"
    assert not calls.exists(), calls.read_text()
    log = (tmp_path / "server.log").read_text()
    assert "Traceback" not in log


def test_a_failed_start_does_not_tell_the_token(tmp_path: Path, model: Path) -> None:
    token = "token-of-the-user-1234567890"
    (tmp_path / "config.yaml").write_text(
        "base_model: ./no-model\nrl: grpo\nadapter: lora\noutput_dir: ./out\n"
        "micro_batch_size: 8\nlearning_rate: 1.0e-5\n"
        "vllm: {engine: transformers, device: cpu, sync_dir: ./sync}\n"
        "trl: {use_vllm: true, vllm_lora_sync: true, max_completion_length: 16}\n"
    )
    environment = {**os.environ, "AXOLOTL_SERVER_TOKEN": token, "HF_HUB_OFFLINE": "1"}
    command = [*serve_command(tmp_path / "config.yaml"), "--vllm.port", str(free_port())]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert token.encode() not in done.stdout + done.stderr
    assert not [path for path, text in texts_below(tmp_path).items() if token.encode() in text]
