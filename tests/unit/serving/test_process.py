"""Trees and groups of real processes: what is ended is exactly what was meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from axolotl.serving import process
from axolotl.serving.process import end_group, ended_how, signal_group, start_group, stop_tree

# Prints its child's pid; with `deaf` neither of the two takes SIGTERM.
TREE = """
import signal, subprocess, sys, time
def deafen():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
is_deaf = "deaf" in sys.argv
if is_deaf:
    deafen()
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeper, preexec_fn=deafen if is_deaf else None)
def stop(*_):
    child.terminate(); child.wait(); sys.exit(0)
if not is_deaf:
    signal.signal(signal.SIGTERM, stop)
print(child.pid, flush=True)
time.sleep(600)
"""

# Starts a group whose server cannot take SIGTERM, and says its pid.
RUNNER = """
import sys, time
from pathlib import Path
from axolotl.serving.process import start_group
started = start_group([sys.executable, "-S", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"],
                      Path(sys.argv[1]), None)
print(started.pid, flush=True)
time.sleep(600)
"""


# The same with a server that only notes SIGTERM.
DEAF = RUNNER.replace(
    "print(os.getpid()", "import signal; signal.signal(15, lambda *_: print('told', flush=True)); print(os.getpid()"
)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    deadline, tick = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        tick.wait(0.02)


@contextmanager
def tree(*arguments: str) -> Iterator[tuple[psutil.Process, int]]:
    root = subprocess.Popen([sys.executable, "-S", "-c", TREE, *arguments], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    child = int(root.stdout.readline())
    try:
        yield psutil.Process(root.pid), child
    finally:
        for pid in (root.pid, child):
            if is_running(pid):
                psutil.Process(pid).kill()
        root.communicate()


def test_a_tree_that_ends_by_itself_is_not_killed() -> None:
    with tree() as (root, child), tree() as (other, other_child):
        stopped = stop_tree(root)
        assert (stopped.num_processes, stopped.num_killed) == (2, 0)
        assert not is_running(root.pid) and not is_running(child)
        assert is_running(other.pid) and is_running(other_child)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_does_not_end_by_itself_is_killed(is_stopped: bool) -> None:
    with tree("deaf") as (root, child):
        if is_stopped:
            root.send_signal(signal.SIGSTOP)
        assert stop_tree(root, terminate_s=0.3).num_killed == 2
        assert not is_running(root.pid) and not is_running(child)


def test_children_of_a_root_that_is_killed_meanwhile_are_ended_too() -> None:
    with tree("deaf") as (root, child):
        killer = threading.Timer(0.3, root.kill)
        killer.start()
        stopped = stop_tree(root, terminate_s=10)
        killer.join()
        assert (stopped.num_processes, stopped.num_killed) == (2, 1)
        assert not is_running(child)


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "SIGTERM"),
        ("print('well')", "exit code 0"),
    ],
)
def test_a_group_ends_as_its_command_did(tmp_path: Path, program: str, how: str) -> None:
    started = start_group([sys.executable, "-S", "-c", program], tmp_path / "log", None)
    assert ended_how(started.wait(20)) == how
    end_group(started.pid)


def test_a_command_that_does_not_exist_is_named_in_the_log(tmp_path: Path) -> None:
    started = start_group(["no-such-program"], tmp_path / "log", None)
    assert started.wait(20) == 127
    assert (tmp_path / "log").read_text() == "no-such-program: No such file or directory\n"


@pytest.mark.parametrize("stopped", ["nothing", "server", "launcher", "both"])
def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path, stopped: str) -> None:
    log = tmp_path / "log"
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(log)], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    launcher = int(runner.stdout.readline())
    wait_until(lambda: log.read_text().strip(), "the server")
    server = int(log.read_text())
    for pid, name in ((server, "server"), (launcher, "launcher")):
        if stopped in (name, "both"):
            # It takes no SIGTERM: what ends the launcher must be a signal that a stopped process takes.
            psutil.Process(pid).send_signal(signal.SIGSTOP)
            wait_until(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"{name} stopped")
    runner.kill()
    runner.communicate()
    wait_until(lambda: not is_running(server) and not is_running(launcher), "both gone", seconds=10)


@pytest.mark.slow
def test_a_group_that_is_stopped_while_it_has_time_to_close_is_killed_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log"
    runner = subprocess.Popen([sys.executable, "-c", DEAF, str(log)], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    launcher = int(runner.stdout.readline())
    wait_until(lambda: log.read_text().strip(), "the server")
    server = int(log.read_text())
    runner.kill()
    runner.communicate()
    wait_until(lambda: "told" in log.read_text(), "SIGTERM")
    outside = psutil.Process(launcher).children()
    os.killpg(launcher, signal.SIGSTOP)
    wait_until(lambda: not is_running(server) and not is_running(launcher), "both gone", seconds=10)
    wait_until(lambda: not any(is_running(process.pid) for process in outside), "what killed them", seconds=5)


def test_a_group_that_was_stopped_goes_on_when_it_is_told_to(tmp_path: Path) -> None:
    """The signal that tells of the parent's end is one that others send too: theirs must not end a server."""
    log = tmp_path / "log"
    counting = "import time\nwhile True:\n    print('on', flush=True)\n    time.sleep(0.01)"
    started = start_group([sys.executable, "-S", "-c", counting], log, None)
    try:
        wait_until(log.read_text, "the command")
        signal_group(started.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(started.pid).status() == psutil.STATUS_STOPPED, "stopped")
        subprocess.run(["kill", "-CONT", "--", f"-{started.pid}"], check=True)
        wait_until(lambda: psutil.Process(started.pid).status() != psutil.STATUS_STOPPED, "going on")
        size = log.stat().st_size
        wait_until(lambda: log.stat().st_size > size + 60, "twenty more lines")
        assert started.poll() is None
    finally:
        end_group(started.pid)
        started.wait(20)


def test_a_thread_that_ends_takes_the_group_along(tmp_path: Path) -> None:
    """Why the supervisor has a thread of its own: the kernel watches the thread, not the process."""
    command = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(start_group(command, tmp_path / "log", None))
        # The launcher has made itself known to the kernel by then.
        wait_until((tmp_path / "log").read_text, "the command")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert started[0].wait(20) != 0
    end_group(started[0].pid)


def test_ending_a_group_that_is_gone_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KILL_S", 100.0)
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True)
    ended.wait(20)
    end_group(ended.pid)
