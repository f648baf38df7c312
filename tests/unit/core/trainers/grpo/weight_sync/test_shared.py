"""One push for all ranks, in two real processes: it is confirmed for all of them, or fails for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from axolotl.core.trainers.grpo.distributed import World
from axolotl.core.trainers.grpo.weight_sync.shared import SharedSync
from axolotl.errors import SyncError
from tests.support.rank_processes import codes, on_two_ranks

pytestmark = pytest.mark.slow


class Noted:
    """The main process's own sync; refuses version 3."""

    keeps_versions = True

    def __init__(self) -> None:
        self.version = 0
        self.calls: list[str] = []
        self.metrics = {"sync/save": 0.5}

    def begin(self, version: int) -> None:
        self.calls.append(f"begin {version}")
        self.version = version

    def push(self, version: int) -> None: ...

    def settle(self) -> None:
        self.calls.append("settle")
        if self.version == 3:
            raise SyncError("refused", code="E-SYN-01")

    def close(self) -> None:
        self.calls.append("close")


def pushes(world: World) -> list[object]:
    inner = Noted() if world.is_main else None
    sync = SharedSync(world, inner, keeps_versions=True)
    sync.push(1)
    sync.begin(2)
    ordered = sync.version
    sync.settle()
    sync.close()
    return [ordered, sync.version, dict(sync.metrics), inner.calls if inner else []]


def test_the_first_pushes_and_all_know_the_version(tmp_path: Path) -> None:
    main, other = on_two_ranks(pushes, tmp_path)
    assert main.value == [2, 2, {"sync/save": 0.5}, ["begin 1", "settle", "begin 2", "settle", "close"]]
    assert other.value == [2, 2, {}, []]


def refused(world: World) -> None:
    sync = SharedSync(world, Noted() if world.is_main else None, keeps_versions=True)
    sync.push(2)
    try:
        sync.push(3)
    finally:
        assert sync.version == 2, "what was not confirmed was never there"


def test_what_is_not_confirmed_is_not_there_for_any_of_them(tmp_path: Path) -> None:
    assert codes(on_two_ranks(refused, tmp_path)) == ["E-SYN-01"] * 2
