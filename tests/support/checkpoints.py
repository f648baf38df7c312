"""Checkpoints as a run saves them, and what can happen to them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from axolotl.core.run.checkpoints.store import CheckpointStore

CONTENTS: Mapping[str, bytes] = {
    "adapter_model.safetensors": b"weights " * 100,
    "optimizer.pt": b"moments " * 50,
    "rollouts/rank-0.json": b'{"orders": []}',
    "scheduler.pt": b"schedule",
    "trainer_state.json": b'{"global_step": 1}',
}


def write(directory: Path, contents: Mapping[str, bytes] = CONTENTS) -> None:
    for name, content in contents.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def saved(output_dir: Path, *steps: int, record: Mapping[str, Any] | None = None) -> list[Path]:
    """Complete checkpoints of these steps."""
    store = CheckpointStore(output_dir, record=record or {"config": {}, "num_processes": 1, "data": None})
    return [store.save(step, write) for step in steps]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: tuple[Callable[[Path], None], ...] = (truncate, remove, flip)
