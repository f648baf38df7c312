"""`axolotl vllm-stop`: end the process tree of one server, the one that its `server.json` names."""

from __future__ import annotations

from pathlib import Path

import psutil

from axolotl.errors import EnvironmentFault
from axolotl.serving.process import stop_tree
from axolotl.serving.server_file import SERVER_FILE, ServerFile, read_server_file, remove_server_file
from axolotl.utils.schemas.plan import default_sync_dir

DEFAULT_PORT = 8000


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
    run_pid = managed_by(found)
    stopped = stop_tree(psutil.Process(found.pid))
    remove_server_file(directory, found.instance_id)
    print(_line(found, stopped.num_processes - 1, stopped.num_killed), flush=True)
    if run_pid is not None:
        print(f"it belongs to the training run with pid {run_pid}, which starts it again; stop the run to end both")


def managed_by(server: ServerFile) -> int | None:
    """The pid of the run that started the server and watches it; None for a server of its own."""
    try:
        launcher = psutil.Process(server.pid).parent()
        if launcher is None or "axolotl.serving.launcher" not in launcher.cmdline():
            return None
        return launcher.ppid()
    except psutil.Error:
        return None


def _line(server: ServerFile, num_children: int, num_killed: int) -> str:
    processes = f"pid {server.pid}" + (f" and {num_children} child processes" if num_children else "")
    killed = f"; {num_killed} had to be killed" if num_killed else ""
    return f"stopped the server at {server.url} ({processes}{killed})"
