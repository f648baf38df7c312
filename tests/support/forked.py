"""`axolotl` commands as forks of one process that has imported everything: a start takes a second instead of ten."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from tests.support.cli import free_port
from tests.support.rank_processes import rank_environment

# What a training run and a server import while they run, and nothing that starts a thread by being imported.
_PRELOAD = [
    "axolotl.cli.main",
    "axolotl.cli.train",
    "axolotl.core.builders.rl",
    "axolotl.core.run.emergency",
    "axolotl.core.run.step_record",
    "axolotl.scripts.vllm_serve_lora",
]


class Forked:
    """A command that runs in `directory`; what it prints goes to `log` there, after what is in it already."""

    def __init__(self, directory: Path, arguments: tuple[str, ...], environment: Mapping[str, str], log: str) -> None:
        self.log = directory / log
        self.log.touch()
        self._begin = self.log.stat().st_size
        self._process: ForkServerProcess = _context().Process(
            target=_run, args=(directory, arguments, dict(environment), self.log), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def output(self) -> str:
        """What this command printed."""
        return self.log.read_bytes()[self._begin :].decode()

    def wait(self, timeout_s: float = 120.0) -> int | None:
        """The exit code, the number of the signal below 0 where one ended it; None while it runs."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL, if it still runs. Returns when it is gone."""
        self._process.kill()
        self._process.join(10)

    def terminate(self) -> None:
        self._process.terminate()


@contextmanager
def forked(directory: Path, *arguments: str, log: str = "output.log", **environment: str) -> Iterator[Forked]:
    """Start a command; whatever happens, it is gone afterwards."""
    command = Forked(directory, arguments, environment, log)
    try:
        yield command
    finally:
        command.kill()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Read when the first command is started; from then on there is one process to fork from.
    context.set_forkserver_preload(_PRELOAD)
    return context


def _run(directory: Path, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    os.environ.update(environment)
    import torch

    from axolotl.cli.main import main

    # Tests share two cores.
    torch.set_num_threads(1)
    sys.exit(main(arguments))


@contextmanager
def forked_ranks(
    directory: Path, *arguments: str, size: int = 2, only: Mapping[int, Mapping[str, str]] | None = None
) -> Iterator[list[Forked]]:
    """Start the command `size` times, as `torchrun` does; what rank N prints goes to `rank-N.log`.

    Args:
        only: environment of single ranks.
    """
    port = free_port()
    commands: list[Forked] = []
    try:
        for rank in range(size):
            environment = {**rank_environment(rank, size, port), **(only or {}).get(rank, {})}
            commands.append(Forked(directory, arguments, environment, f"rank-{rank}.log"))
        yield commands
    finally:
        for command in commands:
            command.kill()
