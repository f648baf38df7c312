"""Which process a run is, and whether it can be said for certain that it is gone.

A host name and a pid do not name a process: two containers may have equal ones, pid 1 even. So a run also sends the
namespace that its pid belongs to, and who is in another one knows nothing about that process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunProcess:
    """namespace: as `own_namespace`, empty where there is none. started: in clock ticks since the machine started, as
    seen from this process when it lived; None when it could not be seen from here."""

    namespace: str
    pid: int
    started: int | None


def own_namespace() -> str:
    """What pid numbers of this process mean something in: this start of this machine, and the kernel's pid namespace.
    Empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When the process started; None when it is unknown here or has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if state in ("Z", "X", "x") else int(fields[18])


class ProcessTable:
    """What can be seen from a namespace. Both arguments are those of this process, unless a test gives others."""

    def __init__(self, namespace: str | None = None, started: Callable[[int], int | None] = start_ticks) -> None:
        self._namespace = own_namespace() if namespace is None else namespace
        self._started = started

    def find(self, namespace: str, pid: int) -> RunProcess:
        is_visible = namespace != "" and namespace == self._namespace
        return RunProcess(namespace, pid, self._started(pid) if is_visible else None)

    def is_alive(self, process: RunProcess) -> bool | None:
        """None when it cannot be told: it is somewhere else, or was never seen."""
        if process.started is None or process.namespace != self._namespace:
            return None
        return self._started(process.pid) == process.started

    def is_same(self, process: RunProcess, other: RunProcess) -> bool:
        """Whether both are one process, for certain. Both must have been found when they were alive."""
        return process.started is not None and process == other
