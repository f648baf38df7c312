"""Whose directories may be deleted, and when: rules over a clock and a process table made by hand."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from axolotl.serving.processes import ProcessTable
from axolotl.serving.run_directories import KEEP_S, MAX_SILENT, RunDirectories
from tests.support.adapters import publish_fake, publish_fake_weights

OLD, NEW = "run-0123456789ab", "run-ba9876543210"
START = 1_000_000.0


class World:
    """`processes`: the pids that live in namespace `here`, with their start times."""

    def __init__(self, sync_dir: Path) -> None:
        self.sync_dir = sync_dir
        self.now = START
        self.processes = {10: 1}
        self.table = ProcessTable("here", lambda pid: self.processes.get(pid))
        self.directories = RunDirectories(sync_dir, self.table, now=lambda: self.now)

    def run(self, run_id: str, *, place: str = "there", pid: int = 10) -> None:
        """It claims and publishes an adapter and weights; one more adapter is being written."""
        self.directories.claimed(run_id, self.table.find(place, pid))
        self.publish(run_id)

    def publish(self, run_id: str) -> None:
        publish_fake(self.sync_dir, run_id, 1)
        publish_fake_weights(self.sync_dir, run_id, 1)
        (self.sync_dir / "adapters" / run_id / ".tmp-v2").mkdir()
        for name in ("adapters", "weights"):
            os.utime(self.sync_dir / name / run_id, (self.now, self.now))

    def left(self) -> set[str]:
        """The runs of which anything is there, whatever it is."""
        assert all(path.parent.name in ("adapters", "weights", "runs") for path in self.sync_dir.glob("*/*"))
        return {path.stem for path in self.sync_dir.glob("*/*")}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_silent_run_elsewhere_may_come_back_until_a_day_has_passed(world: World) -> None:
    world.run(OLD)
    world.run(NEW)
    world.now = START + KEEP_S
    world.directories.clean(kept=NEW)
    assert world.left() == {OLD, NEW}
    world.directories.heard(OLD)
    world.now += KEEP_S
    world.directories.clean(kept=NEW)
    assert world.left() == {OLD, NEW}
    world.now += 1
    world.directories.clean(kept=NEW)
    assert world.left() == {NEW}


def test_a_stopped_process_that_can_be_seen_keeps_its_own_for_ever(world: World) -> None:
    world.run(OLD, place="here")
    world.now += 100 * KEEP_S
    world.directories.clean(kept=NEW)
    assert world.left() == {OLD}


@pytest.mark.parametrize("start", [None, 2])
def test_a_process_that_is_gone_leaves_nothing_not_even_to_the_next_server(world: World, start: int | None) -> None:
    world.run(OLD, place="here")
    world.processes = {10: start} if start else {}
    again = RunDirectories(world.sync_dir, world.table, now=lambda: world.now)
    again.clean(kept=NEW)
    assert world.left() == set()


def test_a_run_that_gave_the_server_back_keeps_its_last_policy_until_the_next_one(world: World) -> None:
    world.run(OLD)
    world.directories.over(OLD)
    assert world.left() == {OLD}
    world.run(NEW)
    world.directories.clean(kept=NEW)
    assert world.left() == {NEW}


def test_a_run_that_comes_back_is_not_over(world: World) -> None:
    world.run(OLD)
    world.directories.over(OLD)
    world.directories.claimed(OLD, world.table.find("there", 10))
    world.directories.clean(kept=NEW)
    assert world.left() == {OLD}


def test_of_runs_that_cannot_be_seen_the_last_ones_heard_are_kept(world: World) -> None:
    runs = [f"run-{number:012x}" for number in range(3 * MAX_SILENT)]
    for run_id in runs:
        world.now += 1
        world.run(run_id)
        world.directories.clean(kept=run_id)
        assert len(world.left()) <= MAX_SILENT + 1
    assert world.left() == set(runs[-MAX_SILENT - 1 :])


def test_publishing_is_a_sign_of_life_of_a_run_without_a_record(world: World) -> None:
    world.publish(OLD)
    world.now += KEEP_S
    world.directories.clean(kept=NEW)
    assert world.left() == {OLD}
    world.now += 1
    world.directories.clean(kept=NEW)
    assert world.left() == set()


def test_a_server_that_ends_leaves_no_empty_directories(world: World) -> None:
    (world.sync_dir / "server.json").write_text("{}")
    world.run(OLD)
    world.directories.over(OLD)
    world.directories.clean()
    assert [path.name for path in world.sync_dir.iterdir()] == ["server.json"]
    world.directories.clean()


def test_a_record_is_for_its_owner_only_and_nonsense_in_its_place_is_none(world: World) -> None:
    world.run(OLD, place="here")
    file = world.sync_dir / "runs" / f"{OLD}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.write_text("nonsense")
    os.utime(file, (world.now, world.now))
    world.processes = {}
    world.directories.clean(kept=NEW)
    assert world.left() == {OLD}, "nobody knows any more that its process is gone"


def test_a_claim_is_not_refused_because_it_cannot_be_noted(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (world.sync_dir / "runs").write_text("a file")
    world.directories.claimed(OLD, world.table.find("here", 10))
    world.directories.heard(OLD)
    world.directories.over(OLD)
    world.directories.clean(kept=NEW)
    assert f"{OLD} was not noted" in caplog.text


def test_only_names_that_a_trainer_gives_are_noted(world: World) -> None:
    world.directories.claimed("somebody", world.table.find("here", 10))
    assert world.left() == set()


@pytest.mark.parametrize(
    "kept",
    [
        "my-adapters/v1/weights",
        "run-0123456789ab-copy/v1/weights",
        "run-0123456789ab/notes.txt",
        "run-0123456789ab/v1-best/weights",
        "run-0123456789ab/v2",
    ],
)
def test_what_no_trainer_made_is_never_removed(world: World, kept: str) -> None:
    """Each is a file: `v2` too, where a trainer writes directories only."""
    file = world.sync_dir / "adapters" / kept
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    (world.sync_dir / "adapters" / "run-ffffffffffff").symlink_to(file.parent)
    world.now = 10 * os.stat(file).st_mtime
    world.directories.clean(kept=NEW)
    assert file.read_text() == "mine"
