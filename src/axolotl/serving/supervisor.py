"""A server that belongs to one run (`vllm.managed: true`): start it, wait for it, stop exactly its process group.

check the port ─► launcher ─exec─► vllm-serve ─► wait_ready, watching that it lives ─► run ─► stop the group
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx

from axolotl.errors import EnvironmentFault
from axolotl.serving import ports
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import ServerInfo

TERMINATE_S = 20.0
KILL_S = 10.0
LOG_TAIL_LINES = 12


def serve_command(config_path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """The command of `axolotl vllm-serve` in this very environment."""
    return [sys.executable, "-m", "axolotl.cli.main", "vllm-serve", str(config_path), *overrides]


class ManagedServer:
    """The server process of a run. A context manager: leaving the block stops it, whatever the reason.

    Start it from a thread that lives as long as the run (the main thread): the server ends with that thread.

    Args:
        command: what to run, usually `serve_command(...)`.
        url: where it will answer, `http://host:port`.
        sync_dir: where it leaves its token.
        log_path: file that gets its output; made anew, with its directory.
        environment: variables of the server, those of this process when None.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        sync_dir: Path,
        log_path: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.url = url
        self.log_path = log_path
        self._command = list(command)
        self._sync_dir = sync_dir
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ManagedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process id, which is also its process group; None when it is not running."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process; it loads in the background.

        Raises:
            EnvironmentFault: `E-ENV-02` the port is taken.
        """
        assert self._process is None, "already started"
        address = httpx.URL(self.url)
        ports.check_free(address.host, 80 if address.port is None else address.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-m", "axolotl.serving.launcher", str(os.getpid()), *self._command]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                launcher,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )

    def wait_ready(self, client: ServerClient, on_wait: Callable[[str], None] | None = None) -> ServerInfo:
        """`client.wait_ready`, ended at once with the server's own last words when it exits.

        Raises:
            EnvironmentFault: `E-ENV-05` the server exited.
            ServerError: as `client.wait_ready`.
        """
        return client.wait_ready(on_wait, check=self.check_alive)

    def check_alive(self) -> None:
        """Raise `EnvironmentFault` when the process has exited."""
        assert self._process is not None, "not started"
        code = self._process.poll()
        if code is None:
            return
        ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise EnvironmentFault(
            f"the managed server ended ({ended})",
            code="E-ENV-05",
            why=f"its last lines are above; all of them are in {self.log_path}",
            do="correct what they name and run train again",
            details=tuple(self.log_tail()),
        )

    def log_tail(self) -> list[str]:
        """The last lines of its log that say something."""
        with suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()
            return [line for line in lines if line.strip()][-LOG_TAIL_LINES:]
        return []

    def stop(self) -> None:
        """SIGTERM to the whole group, SIGKILL after 20 s to what is left. Safe to call twice, and without start."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(TERMINATE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _signal_group(process.pid, signal.SIGKILL)
        process.wait(KILL_S)
        _wait_group_gone(process.pid, time.monotonic() + KILL_S)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _wait_group_gone(group: int, deadline: float) -> None:
    """A killed grandchild is reaped by init a moment later; its pid must not be mistaken for a living one."""
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)
