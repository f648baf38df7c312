"""A managed server over a stand-in process: deaths, hangs, the budget, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from axolotl.errors import AxolotlError, EnvironmentFault, ServerError
from axolotl.serving.process import group_of
from axolotl.serving.server_file import ServerFile, read_server_file
from axolotl.serving.supervisor import LOG_HEADER, ManagedServer
from tests.support.cli import free_port

FAKE = Path(__file__).resolve().parents[2] / "fakes" / "server_process.py"
DEADLINE_S = 30.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        tick.wait(0.02)


class Kept:
    """A managed stand-in, and what it said."""

    def __init__(self, directory: Path, behaviour: str, **options: float) -> None:
        self.port = free_port()
        self.sync_dir = directory
        self.said: list[str] = []
        self.server = ManagedServer(
            [sys.executable, str(FAKE), str(directory), str(self.port), behaviour],
            url=f"http://127.0.0.1:{self.port}",
            sync_dir=directory,
            log_path=directory / "log" / "server.log",
            say=self.said.append,
            **options,  # type: ignore[arg-type]
        )

    @property
    def num_starts(self) -> int:
        starts = self.sync_dir / "starts"
        return len(starts.read_text()) if starts.exists() else 0

    def file(self) -> ServerFile:
        """`server.json` of a process that answers."""

        def answers() -> bool:
            found = read_server_file(self.sync_dir)
            if found is None or not is_running(found.pid):
                return False
            try:
                return httpx.get(f"http://127.0.0.1:{self.port}/health/", timeout=5, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers, "a server that answers")
        found = read_server_file(self.sync_dir)
        assert found is not None
        return found

    def next_file(self, before: ServerFile) -> ServerFile:
        def is_another() -> bool:
            found = read_server_file(self.sync_dir)
            return found is not None and found.instance_id != before.instance_id

        wait_until(is_another, "another instance")
        return self.file()

    def verdict(self) -> AxolotlError:
        def ended() -> bool:
            try:
                self.server.check_alive()
            except AxolotlError:
                return True
            return False

        wait_until(ended, "the end")
        with pytest.raises(AxolotlError) as problem:
            self.server.check_alive()
        return problem.value

    def log(self) -> str:
        return self.server.log_path.read_text()


@contextmanager
def kept(directory: Path, behaviour: str = "serve", **options: float) -> Iterator[Kept]:
    made = Kept(directory, behaviour, **options)
    with made.server:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axolotl.serving.supervisor.HEALTH_INTERVAL_S", 0.02)
    monkeypatch.setattr("axolotl.serving.restarts.FIRST_PAUSE_S", 0.01)


def is_running(pid: int) -> bool:
    """A zombie that init has not reaped yet does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_of(group: int) -> list[int]:
    return [pid for pid in psutil.pids() if group_of(pid) == group and is_running(pid)]


def test_it_serves_in_a_group_of_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    with kept(tmp_path) as made:
        found = made.file()
        group = made.server.pid
        assert group is not None and os.getpgid(found.pid) == group != os.getpgid(0)
        # The launcher, the server and the server's child.
        assert len(all_of(group)) == 3
    assert all_of(group) == []
    assert made.server.pid is None
    assert "stopped cleanly" in made.log() and "Traceback" not in made.log()
    made.server.stop()


@pytest.mark.parametrize("victim", ["server", "launcher"])
def test_a_killed_server_is_started_again_by_itself(tmp_path: Path, victim: str) -> None:
    with kept(tmp_path) as made:
        first = made.file()
        group = made.server.pid
        assert group is not None
        child = int((tmp_path / "child").read_text())
        os.kill(first.pid if victim == "server" else group, signal.SIGKILL)
        second = made.next_file(first)
        assert second.url == first.url and second.pid != first.pid
        assert not is_running(child), "what the dead server had started is gone too"
        made.server.check_alive()
    assert made.said == ["the generation server ended (SIGKILL); starting it again (1 of 5)"]
    assert made.log().count(LOG_HEADER) == 2 and "serving (start 1)" in made.log()


def test_a_hung_server_is_killed_with_its_group_and_started_again(tmp_path: Path) -> None:
    with kept(tmp_path) as made:
        first = made.file()
        os.kill(first.pid, signal.SIGSTOP)
        made.server.revive(first.instance_id, is_hung=True)
        second = made.next_file(first)
        assert not is_running(first.pid)
        # Whoever is late must not kill the new one.
        made.server.revive(first.instance_id, is_hung=True)
        made.server.revive(second.instance_id, is_hung=False)
        made.server.check_alive()
        assert made.file().pid == second.pid
    assert made.said == ["the generation server ended (it hung); starting it again (1 of 5)"]


def test_restarts_in_a_row_are_counted_and_an_answer_refills_them(tmp_path: Path) -> None:
    with kept(tmp_path, max_restarts=1) as made:
        first = made.file()
        os.kill(first.pid, signal.SIGKILL)
        second = made.next_file(first)
        made.server.served(second.instance_id)
        os.kill(second.pid, signal.SIGKILL)
        third = made.next_file(second)
        os.kill(third.pid, signal.SIGKILL)
        verdict = made.verdict()
        assert isinstance(verdict, ServerError) and verdict.code == "E-SRV-24"
        assert "vllm.max_restarts is 1" in verdict.why
        with pytest.raises(ServerError, match="not started again"):
            made.server.revive(third.instance_id, is_hung=False)
    assert made.num_starts == 3


def test_no_restart_at_all(tmp_path: Path) -> None:
    with kept(tmp_path, max_restarts=0) as made:
        first = made.file()
        made.server.served(first.instance_id)
        os.kill(first.pid, signal.SIGKILL)
        assert made.verdict().code == "E-SRV-24"
    assert made.num_starts == 1 and made.said == []


def test_restarts_that_fail_end_with_the_last_words(tmp_path: Path) -> None:
    with kept(tmp_path, "fail-later", max_restarts=2) as made:
        first = made.file()
        made.server.served(first.instance_id)
        os.kill(first.pid, signal.SIGKILL)
        verdict = made.verdict()
    assert verdict.code == "E-SRV-24" and "exit code 3" in verdict.what
    assert verdict.details == ("cannot find the model (start 3)",)


def test_a_first_start_that_fails_is_final(tmp_path: Path) -> None:
    with kept(tmp_path, "fail") as made:
        verdict = made.verdict()
    assert isinstance(verdict, EnvironmentFault) and verdict.code == "E-ENV-05" and "exit code 3" in verdict.what
    assert verdict.details == ("cannot find the model (start 1)",)
    assert made.num_starts == 1


def test_a_start_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axolotl.serving.supervisor.HEALTH_TIMEOUT_S", 0.2)
    with kept(tmp_path, "silent", silence_s=1.0) as made:
        assert "said nothing for 1 s" in made.verdict().what


def test_a_port_that_somebody_else_took_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axolotl.serving.supervisor.PORT_WAIT_S", 0.0)
    taken = EnvironmentFault("port 8000 is in use by pid 7 (somebody)", code="E-ENV-02")

    with kept(tmp_path) as made:
        first = made.file()
        made.server.served(first.instance_id)

        def refuse(host: str, port: int) -> None:
            raise taken

        monkeypatch.setattr("axolotl.serving.ports.check_free", refuse)
        os.kill(first.pid, signal.SIGKILL)
        verdict = made.verdict()
    assert verdict.code == "E-SRV-24" and "in use by pid 7" in verdict.why


def test_stop_does_not_start_it_again(tmp_path: Path) -> None:
    with kept(tmp_path) as made:
        made.file()
    assert made.num_starts == 1 and made.said == []


def test_a_stopped_process_is_ended_too(tmp_path: Path) -> None:
    with kept(tmp_path) as made:
        found = made.file()
        os.kill(found.pid, signal.SIGSTOP)
    assert not is_running(found.pid)


def test_another_server_of_the_same_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with kept(tmp_path / "a") as bystander:
        before = bystander.file()
        with kept(tmp_path / "b") as made:
            first = made.file()
            os.kill(first.pid, signal.SIGKILL)
            made.next_file(first)
        assert bystander.file() == before
        assert bystander.num_starts == 1
