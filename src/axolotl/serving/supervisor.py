"""A server that belongs to one run (`vllm.managed: true`): start it, watch it, start it again, stop exactly its group.

                    ┌────────────────────────── its thread ───────────────────────────┐
    start() ───────►│ start the group ─► look at /health/ until ready ─► wait for its end │
                    │       ▲                                                  │          │
                    │       └── port free again ◄── budget left? ◄── end the group ◄──┘   │
                    └─────────────────────────────────────────────────────────────────┘
    revive(), stop(): signal the group, from any thread; the thread above sees the end and does the rest

The thread lives as long as the server, because the kernel ends the server with the thread that started it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from axolotl.errors import AxolotlError, EnvironmentFault
from axolotl.serving import ports
from axolotl.serving.client import ServerClient
from axolotl.serving.process import KILL_S, TERMINATE_S, end_group, ended_how, group_of, signal_group, start_group
from axolotl.serving.restarts import Restarts, lost
from axolotl.serving.server_file import read_server_file
from axolotl.serving.wire import Health, ServerInfo

LOG_TAIL_LINES = 12
LOG_HEADER = "--- server start"
PORT_WAIT_S = 30.0
HEALTH_INTERVAL_S = 0.5
HEALTH_TIMEOUT_S = 5.0


def serve_command(config_path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """The command of `axolotl vllm-serve` in this very environment."""
    return [sys.executable, "-m", "axolotl.cli.main", "vllm-serve", str(config_path), *overrides]


@dataclass
class _State:
    """What the threads share, under the lock of `ManagedServer`.

    process: the one that runs; None before, between and after. num_starts: all of them. why: what the coming end of
    the process is to be called, when we caused it. verdict: it will not run again, and this is why.
    """

    restarts: Restarts
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    why: str = ""
    verdict: AxolotlError | None = None


class ManagedServer:
    """The server process of a run. A context manager: leaving the block stops it, whatever the reason.

    It is the client's `Keeper`; `revive`, `check_alive` and `served` may be called from any thread.

    Args:
        command: what to run, usually `serve_command(...)`.
        url: where it will answer, `http://host:port`; a restarted one answers there too.
        sync_dir: where it leaves its token.
        log_path: file that its output is appended to, each start under a line of its own.
        environment: variables of the server, those of this process when None.
        max_restarts: how often in a row it is started again without an answered request in between.
        silence_s: a process that is starting and does not even answer `/health/` for so long counts as hung.
        say: gets a line when it ended and is started again.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        sync_dir: Path,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        max_restarts: int = 5,
        silence_s: float = 300.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.url = url
        self.log_path = log_path
        self._command = list(command)
        self._sync_dir = sync_dir
        self._environment = environment
        self._silence_s = silence_s
        self._say = say
        self._lock = threading.Lock()
        self._state = _State(Restarts(max_restarts))
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ManagedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The process group of the server, which is its launcher's pid; None while it is not running."""
        with self._lock:
            return self._state.process.pid if self._state.process is not None else None

    def start(self) -> None:
        """Start the process; it loads in the background.

        Raises:
            EnvironmentFault: `E-ENV-02` the port is taken.
        """
        assert self._thread is None, "already started"
        ports.check_free(*self._address())
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        spawned = threading.Event()
        # A daemon: a run that ends without `stop` must not wait for its server, and the server ends with the thread.
        self._thread = threading.Thread(target=self._keep, args=(spawned,), name="server-keeper", daemon=True)
        self._thread.start()
        spawned.wait()

    def wait_ready(self, client: ServerClient, on_wait: Callable[[str], None] | None = None) -> ServerInfo:
        """`client.wait_ready`, ended at once with the server's own last words when it exits.

        Raises:
            EnvironmentFault: `E-ENV-05` the server exited.
            ServerError: as `client.wait_ready`.
        """
        info = client.wait_ready(on_wait, check=self.check_alive)
        with self._lock:
            self._state.restarts.was_ready = True
        return info

    # -- Keeper -----------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise when the process has ended and will not be started again.

        Raises:
            EnvironmentFault: `E-ENV-05` it ended before it was ever ready.
            ServerError: `E-SRV-24` the restarts are used up, or its port is taken.
        """
        assert self._thread is not None, "not started"
        with self._lock:
            verdict = self._state.verdict
        if verdict is not None:
            raise verdict

    def revive(self, instance_id: str, *, is_hung: bool) -> None:
        """See to it that a server runs other than the instance that was lost. Returns at once.

        A process that ended is started again without being asked; one that hangs is killed with its whole group,
        unless it is another instance than `instance_id` already. SIGKILL at once: it would take no other signal.

        Raises:
            ServerError: `E-SRV-24`, as `check_alive`.
        """
        self.check_alive()
        if not is_hung:
            return
        found = read_server_file(self._sync_dir)
        with self._lock:
            process = self._state.process
            if process is None or found is None or found.instance_id != instance_id:
                return
            if group_of(found.pid) != process.pid:
                # The file is that of a process before this one.
                return
            self._state.why = "it hung"
            signal_group(process.pid, signal.SIGKILL)

    def served(self, instance_id: str) -> None:
        """A request was answered: all restarts may be used again."""
        with self._lock:
            self._state.restarts.served()

    def stop(self) -> None:
        """SIGTERM to the whole group, SIGKILL after 20 s to what is left. Safe to call twice, and without start."""
        self._stopping.set()
        thread, group = self._thread, self.pid
        if thread is None:
            return
        try:
            if group is not None:
                signal_group(group, signal.SIGTERM)
                signal_group(group, signal.SIGCONT)
                thread.join(TERMINATE_S)
        finally:
            if (group := self.pid) is not None:
                signal_group(group, signal.SIGKILL)
            thread.join(2 * KILL_S)

    def log_tail(self) -> list[str]:
        """The last lines of the newest start that say something."""
        with suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()
            begins = max((n for n, line in enumerate(lines) if line.startswith(LOG_HEADER)), default=-1)
            return [line for line in lines[begins + 1 :] if line.strip()][-LOG_TAIL_LINES:]
        return []

    # -- the thread -------------------------------------------------------------------------------------------------

    def _keep(self, spawned: threading.Event) -> None:
        try:
            while not self._stopping.is_set():
                process = self._spawn()
                spawned.set()
                self._watch_start(process)
                code = process.wait()
                end_group(process.pid)
                if not self._ended(code) or not self._wait_for_port():
                    return
        except Exception as error:
            self._give_up(lost("it cannot be started", f"{type(error).__name__}: {error}"))
        finally:
            spawned.set()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._lock:
            self._state.num_starts += 1
            header = f"{LOG_HEADER} {self._state.num_starts} at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n"
            with self.log_path.open("a") as log:
                log.write(header)
            self._state.process = start_group(self._command, self.log_path, self._environment)
            if self._stopping.is_set():
                # `stop` looked before there was anything to signal.
                signal_group(self._state.process.pid, signal.SIGKILL)
            return self._state.process

    def _watch_start(self, process: subprocess.Popen[bytes]) -> None:
        """Return once the server is ready or has ended. It may load as long as it likes, but it must say so."""
        heard = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=HEALTH_TIMEOUT_S, trust_env=False) as http:
            while process.poll() is None:
                health = _health(http)
                if health == "ok":
                    with self._lock:
                        self._state.restarts.was_ready = True
                    return
                now = time.monotonic()
                heard = now if health is not None else heard
                if now - heard > self._silence_s:
                    with self._lock:
                        self._state.why = f"it said nothing for {self._silence_s:.0f} s while it started"
                    signal_group(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(HEALTH_INTERVAL_S)

    def _ended(self, code: int) -> bool:
        """Whether to start it again."""
        with self._lock:
            state = self._state
            state.process = None
            how, state.why = state.why or ended_how(code), ""
            if self._stopping.is_set():
                return False
            if not state.restarts.take():
                state.verdict = state.restarts.refusal(how, self.log_path, self.log_tail())
                return False
            count, pause_s = state.restarts.count, state.restarts.pause_s
        self._say(f"the generation server ended ({how}); starting it again ({count} of {state.restarts.limit})")
        return not self._stopping.wait(pause_s)

    def _wait_for_port(self) -> bool:
        """Whether the port is free; it may take the kernel a moment after the process has gone."""
        deadline = time.monotonic() + PORT_WAIT_S
        while not self._stopping.is_set():
            try:
                ports.check_free(*self._address())
                return True
            except EnvironmentFault as taken:
                if time.monotonic() >= deadline:
                    self._give_up(lost("the managed server ended and cannot be started again", taken.what))
                    return False
            self._stopping.wait(0.2)
        return False

    def _give_up(self, verdict: AxolotlError) -> None:
        with self._lock:
            self._state.verdict = self._state.verdict or verdict

    def _address(self) -> tuple[str, int]:
        address = httpx.URL(self.url)
        return address.host, 80 if address.port is None else address.port


def _health(http: httpx.Client) -> str | None:
    """`ok`, `loading` or `failed`; None when nobody answers."""
    try:
        return Health.model_validate_json(http.get("/health/").content).status
    except (httpx.TransportError, ValueError):
        return None
