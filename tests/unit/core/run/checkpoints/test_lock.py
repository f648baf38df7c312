"""One live run an output directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from axolotl.core.run.checkpoints.lock import LOCK, run_lock
from axolotl.errors import ConfigError, EnvironmentFault

HOLD = """
import sys
from pathlib import Path
from axolotl.core.run.checkpoints.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_live_run_is_refused_by_name(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(ConfigError) as problem, run_lock(tmp_path):
        pytest.fail("two at once")
    error = problem.value
    assert (error.code, error.exit_code) == ("E-CFG-31", 2)
    assert f"pid {os.getpid()} " in error.what


def test_it_is_free_afterwards_and_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with run_lock(tmp_path / "out"):
            assert (tmp_path / "out" / LOCK).exists()
        assert list((tmp_path / "out").iterdir()) == []


def test_other_directories_do_not_matter(tmp_path: Path) -> None:
    with run_lock(tmp_path / "a"), run_lock(tmp_path / "b"):
        assert (tmp_path / "b" / LOCK).exists()


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"pid {holder.pid} "), run_lock(tmp_path):
            pytest.fail("two at once")
        holder.kill()
        holder.wait(timeout=30)
        with run_lock(tmp_path):
            assert (tmp_path / LOCK).exists()


def test_a_process_forked_from_a_run_does_not_hold_its_lock(tmp_path: Path) -> None:
    read, write = os.pipe()
    with run_lock(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    os.close(read)
    try:
        with run_lock(tmp_path):
            assert (tmp_path / LOCK).exists()
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be used"), run_lock(tmp_path / "out"):
        pytest.fail("locked")
