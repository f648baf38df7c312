"""What can be said about a process, and what cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from axolotl.serving.processes import ProcessTable, RunProcess, own_namespace, start_ticks


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_of_this_namespace_is_seen_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    table = ProcessTable()
    found = table.find(own_namespace(), child.pid)
    assert table.is_alive(found) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert table.is_alive(found) is False, "a zombie has ended"
    child.wait()
    assert table.is_alive(found) is False


def test_the_start_is_the_one_the_system_knows(child: subprocess.Popen[bytes]) -> None:
    ticks = start_ticks(child.pid)
    assert ticks is not None
    since_boot = psutil.Process(child.pid).create_time() - psutil.boot_time()
    assert ticks / os.sysconf("SC_CLK_TCK") == pytest.approx(since_boot, abs=2)
    assert start_ticks(2**22 + 1) is None


def test_a_name_with_brackets_and_spaces_is_read_past() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z 1 (', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert start_ticks(process.pid) is not None
        process.communicate(b"\n")


def test_two_processes_share_a_namespace_and_a_machine_names_its_start() -> None:
    code = "from axolotl.serving.processes import own_namespace; print(own_namespace())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == own_namespace()
    boot, _, kernel = own_namespace().partition(" ")
    assert len(boot) == 36 and kernel.startswith("pid:[")


@pytest.mark.parametrize("namespace", ["elsewhere", ""])
def test_of_another_namespace_nothing_is_known(namespace: str) -> None:
    table = ProcessTable("here", {7: 1}.get)
    there = table.find(namespace, 7)
    assert there == RunProcess(namespace, 7, None) and table.is_alive(there) is None
    assert not table.is_same(there, table.find(namespace, 7)), "two containers may be meant"
    assert ProcessTable("", {7: 1}.get).is_alive(ProcessTable("", {7: 1}.get).find("", 7)) is None


def test_a_pid_that_was_given_away_is_another_process() -> None:
    living = {7: 1}
    table = ProcessTable("here", living.get)
    first = table.find("here", 7)
    assert table.is_same(first, table.find("here", 7))
    living[7] = 2
    assert table.is_alive(first) is False and not table.is_same(first, table.find("here", 7))
