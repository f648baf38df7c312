"""Two processes that know each other as ranks, and do no more than what they agree on. Light: no TRL."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cli import free_port


@dataclass(frozen=True)
class Ended:
    """code: of the process. value: what the scenario returned, or the error it raised as a dict."""

    code: int | None
    value: Any


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher tells a process of one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def on_two_ranks(
    scenario: Callable[..., Any], directory: Path, *, timeout_s: float = 60.0, waits_s: float = 30.0
) -> tuple[Ended, ...]:
    """Run `scenario(world)` on both; whatever happens, they are gone afterwards.

    Args:
        waits_s: the longest that a rank waits for the other.
    """
    context, port = multiprocessing.get_context("forkserver"), free_port()
    context.set_forkserver_preload(["axolotl.core.trainers.grpo.distributed"])
    processes = [
        context.Process(target=_run, args=(scenario, rank, port, directory, waits_s), daemon=True) for rank in (0, 1)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        return tuple(Ended(process.exitcode, _read(directory, rank)) for rank, process in enumerate(processes))
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def killed(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def codes(ended: Sequence[Ended]) -> list[str | None]:
    return [one.value["code"] if isinstance(one.value, dict) else None for one in ended]


def _run(scenario: Callable[..., Any], rank: int, port: int, directory: Path, waits_s: float) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    from axolotl.core.trainers.grpo.distributed import open_world
    from axolotl.errors import AxolotlError

    try:
        with open_world(waits_s) as world, world.telling():
            value = scenario(world)
    except AxolotlError as error:
        value = error.as_json()
    (directory / f"{rank}.json").write_text(json.dumps(value))


def _read(directory: Path, rank: int) -> Any:
    file = directory / f"{rank}.json"
    return json.loads(file.read_text()) if file.is_file() else None
