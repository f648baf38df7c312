"""Running `axolotl` as a user does: real processes with deadlines, or the same entry point inside this process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, offline, with one thread a process: tests share two cores."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}


def axolotl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "axolotl.cli.main", *arguments]


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str


def run(directory: Path, *arguments: str, timeout_s: float = 240, **extra: str) -> Finished:
    """Run a command to its end in `directory`."""
    done = subprocess.run(
        axolotl(*arguments), cwd=directory, env=environment(**extra), capture_output=True, text=True, timeout=timeout_s
    )
    return Finished(done.returncode, done.stdout, done.stderr)


class Running:
    """A command in its own process group whose output can be waited for."""

    def __init__(self, directory: Path, *arguments: str, **extra: str) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            axolotl(*arguments),
            cwd=directory,
            env=environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = 240) -> None:
        """Return when a line with `text` was printed; fail with the output when it never will be."""
        with self._changed:
            seen = self._changed.wait_for(lambda: self._ended or any(text in line for line in self.lines), timeout_s)
        assert seen and any(text in line for line in self.lines), f"never printed {text!r}:\n{self.output}"

    def wait(self, timeout_s: float = 240) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@contextmanager
def running(directory: Path, *arguments: str, **extra: str) -> Iterator[Running]:
    """Start a command; whatever happens, its group is gone afterwards."""
    command = Running(directory, *arguments, **extra)
    try:
        yield command
    finally:
        command.kill()
