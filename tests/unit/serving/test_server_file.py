from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from axolotl.serving.server_file import (
    ServerFile,
    new_token,
    read_server_file,
    read_token,
    remove_server_file,
    write_server_file,
)

CONTENT = ServerFile(url="http://127.0.0.1:1", pid=1, started=0.0, instance_id="a", token="secret")


@pytest.fixture(autouse=True)
def no_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AXOLOTL_SERVER_TOKEN", raising=False)


def test_it_is_for_its_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "servers" / "8000"
    write_server_file(directory, CONTENT)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "server.json").stat().st_mode) == 0o600
    assert [path.name for path in directory.iterdir()] == ["server.json"]
    assert read_server_file(directory) == CONTENT


def test_only_ones_own_is_removed(tmp_path: Path) -> None:
    write_server_file(tmp_path, CONTENT)
    remove_server_file(tmp_path, "b")
    assert read_server_file(tmp_path) == CONTENT
    remove_server_file(tmp_path, "a")
    remove_server_file(tmp_path, "a")
    assert read_server_file(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": 1}'])
def test_a_file_that_is_no_server_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.json").write_text(text)
    assert read_token(tmp_path) is None


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert new_token() != new_token() and len(new_token()) >= 43
    write_server_file(tmp_path, CONTENT)
    assert read_token(tmp_path) == "secret"
    monkeypatch.setenv("AXOLOTL_SERVER_TOKEN", "given")
    assert read_token(tmp_path) == new_token() == "given"


def test_alive_means_that_very_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()
    content = CONTENT.model_copy(update={"pid": child.pid, "started": started})
    assert content.is_alive()
    assert not content.model_copy(update={"started": started - 1}).is_alive()
    child.kill()
    child.communicate()
    assert not content.is_alive()
    own = CONTENT.model_copy(update={"pid": os.getpid(), "started": psutil.Process().create_time()})
    assert not own.is_alive(), "this process may replace its own file"
