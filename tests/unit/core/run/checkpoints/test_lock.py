"""One live run an output directory."""

from __future__ import annotations

import fcntl
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


def test_a_process_forked_from_a_killed_run_does_not_hold_its_lock(tmp_path: Path) -> None:
    fork = "    import os\n    if not os.fork():\n        print(os.getpid(), flush=True)\n    sys.stdin.read()"
    code = HOLD.replace("    sys.stdin.read()", fork)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        child = int(holder.stdout.readline())
        holder.kill()
        holder.wait(timeout=30)
        assert Path(f"/proc/{child}").exists(), "it reads until we close its input"
        with run_lock(tmp_path):
            assert (tmp_path / LOCK).exists()
        holder.stdin.close()
        assert holder.stdout.read() == "", "the child has ended"


def test_a_lock_file_that_is_removed_while_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_flock, removed = fcntl.flock, list[Path]()

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(tmp_path / LOCK)
            removed[0].unlink()
        really_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock(tmp_path), pytest.raises(ConfigError), run_lock(tmp_path):
        pytest.fail("two at once")
    assert removed


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be used"), run_lock(tmp_path / "out"):
        pytest.fail("locked")
