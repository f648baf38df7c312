"""The listening socket, bound before anything slow happens, and who has the port when it is taken."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from itertools import islice

import psutil

from axolotl.errors import EnvironmentFault


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host:port`; port 0 picks a free one. It listens only once the server starts.

    Raises:
        EnvironmentFault: `E-ENV-02` the port is taken, naming the process where that can be seen; `E-ENV-03` the
            address is not one of this machine, or the port is not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise port_taken(port) from error
        raise EnvironmentFault(
            f"cannot listen on {host} port {port}",
            code="E-ENV-03",
            why=error.strerror or str(error),
            do="set vllm.host and vllm.port to an address of this machine and a port you may use",
        ) from error
    return listener


def check_free(host: str, port: int) -> None:
    """Raise as `bind` does when the port cannot be had."""
    bind(host, port).close()


def port_taken(port: int) -> EnvironmentFault:
    owner = port_owner(port)
    by = f" by {owner}" if owner else ""
    return EnvironmentFault(
        f"port {port} is in use{by}",
        code="E-ENV-02",
        do=f"stop that process (a server of ours: axolotl vllm-stop --port {port}), or set vllm.port to a free port",
    )


def port_owner(port: int) -> str | None:
    """`pid 2231 (axolotl config.yaml)` of the process that listens on `port`; None when it cannot be seen.

    Only the program and its config file: the rest of a command line may hold secrets.
    """
    try:
        connections = psutil.net_connections(kind="tcp")
        for connection in connections:
            if connection.laddr and connection.laddr.port == port and connection.pid is not None:
                process = psutil.Process(connection.pid)
                return f"pid {connection.pid} ({program(process.name(), process.cmdline())})"
    except psutil.Error:
        return None
    return None


def program(name: str, arguments: Sequence[str]) -> str:
    """The program's name, with the first argument that is a YAML file."""
    configs = (word for word in arguments if word.endswith((".yaml", ".yml")) and not word.startswith("-"))
    return " ".join([name, *islice(configs, 1)])
