"""`axolotl vllm-stop`: end the process tree of one server, the one that its `server.json` names."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil

from axolotl.errors import EnvironmentFault
from axolotl.serving.process import StoppedTree, end_group, group_of, stop_tree
from axolotl.serving.server_file import SERVER_FILE, ServerFile, read_server_file, remove_server_file
from axolotl.utils.schemas.plan import default_sync_dir

DEFAULT_PORT = 8000
LAUNCHER = "axolotl.serving.launcher"


def directory_of(port: int | None) -> Path:
    """Where the server of a port leaves its `server.json` when its config names no `vllm.sync_dir`."""
    return default_sync_dir(DEFAULT_PORT if port is None else port)


def run(directory: Path) -> None:
    """Stop the server that meets its trainers in `directory`, and say so in one line.

    Raises:
        EnvironmentFault: `E-ENV-10` there is none.
    """
    found = read_server_file(directory)
    if found is None or not found.is_alive():
        gone = f"{directory / SERVER_FILE} is left of pid {found.pid}, which is gone" if found else ""
        raise EnvironmentFault(
            f"no server to stop in {directory}",
            code="E-ENV-10",
            why=gone or f"there is no {SERVER_FILE} there",
            do="give the server's config, or --port with the port it serves",
        )
    launcher = _launcher_of(found)
    run_pid = managed_by(found)
    if launcher is None or run_pid is not None:
        stopped = stop_tree(psutil.Process(found.pid))
    else:
        stopped = _stop_leftovers(launcher)
    if launcher is not None:
        # A launcher that is stopped would not tell its run that the server has ended.
        with suppress(psutil.Error):
            launcher.send_signal(signal.SIGCONT)
    remove_server_file(directory, found.instance_id)
    print(_line(found, stopped.num_processes - 1, stopped.num_killed), flush=True)
    if run_pid is not None:
        print(f"it belongs to the training run with pid {run_pid}, which starts it again; stop the run to end both")


def managed_by(server: ServerFile) -> int | None:
    """The pid of the run that started the server and watches it; None for a server of its own, or of a dead run."""
    launcher = _launcher_of(server)
    if launcher is None:
        return None
    try:
        command, parent = launcher.cmdline(), launcher.ppid()
        # Orphans have another parent than the one that started them: init, or whoever collects them.
        return parent if command[command.index(LAUNCHER) + 1] == str(parent) else None
    except (psutil.Error, ValueError, IndexError):
        return None


def _launcher_of(server: ServerFile) -> psutil.Process | None:
    with suppress(psutil.Error):
        parent = psutil.Process(server.pid).parent()
        if parent is not None and LAUNCHER in parent.cmdline():
            return parent
    return None


def _stop_leftovers(launcher: psutil.Process) -> StoppedTree:
    """End all that a run has left behind: the server, its launcher, and what is in their group. Counts the first."""
    group = group_of(launcher.pid)
    stopped = stop_tree(launcher)
    if group == launcher.pid:
        end_group(group)
    return StoppedTree(stopped.num_processes - 1, stopped.num_killed)


def _line(server: ServerFile, num_children: int, num_killed: int) -> str:
    processes = f"pid {server.pid}" + (f" and {num_children} child processes" if num_children else "")
    killed = f"; {num_killed} had to be killed" if num_killed else ""
    return f"stopped the server at {server.url} ({processes}{killed})"
