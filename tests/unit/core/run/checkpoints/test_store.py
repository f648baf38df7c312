"""A checkpoint is there completely or not at all, whatever fails and wherever the run is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from axolotl.core.run.checkpoints.finding import newest_verified
from axolotl.core.run.checkpoints.manifest import verify
from axolotl.core.run.checkpoints.store import CheckpointStore, checkpoints, step_of, temporaries
from axolotl.errors import PeerError, StorageError
from tests.support.checkpoints import CONTENTS, flip, saved, truncate, write
from tests.support.failing_disk import FailingDisk, is_full, is_killed

RECORD = {"config": {}, "num_processes": 1, "data": None}
MANY = 200


def steps(output_dir: Path) -> list[int]:
    return [step_of(checkpoint) for checkpoint in checkpoints(output_dir)]


def save_the_third(output_dir: Path) -> None:
    """As a run does that keeps two: `checkpoint-1` has to go."""
    store = CheckpointStore(output_dir, limit=2, record=RECORD)
    store.prune(store.save(3, write))


def prepared(output_dir: Path, *, is_replaced: bool) -> Path:
    saved(output_dir, 1, 2, *([3] if is_replaced else []))
    return output_dir


@pytest.mark.parametrize("is_replaced", [False, True])
def test_whichever_operation_fails_older_checkpoints_are_intact(
    tmp_path: Path, is_replaced: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = set()
    for k in range(1, MANY):
        output_dir = prepared(tmp_path / str(k), is_replaced=is_replaced)
        with FailingDisk(k, is_full).in_use() as disk:
            try:
                save_the_third(output_dir)
                outcome = "saved"
            except StorageError as error:
                outcome = f"{error.code} {error.exit_code}"
        outcomes.add(outcome)
        assert all(not verify(checkpoint) for checkpoint in checkpoints(output_dir)), f"operation {k}"
        assert 2 in steps(output_dir) and (outcome == "saved") <= (3 in steps(output_dir)), f"operation {k}"
        assert is_replaced <= (3 in steps(output_dir)), f"operation {k}"
        assert temporaries(output_dir) == [], f"operation {k}"
        if disk.num_operations < k:
            break
    else:
        pytest.fail("never came through")
    assert k > 15, "the disk was not in the way of enough"
    assert outcomes == {"E-STO-01 9", "saved"}
    assert steps(output_dir) == [2, 3]


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.slow
def test_wherever_it_is_killed_the_next_run_finds_a_whole_checkpoint(tmp_path: Path, is_replaced: bool) -> None:
    recovered = 0
    for k in range(1, MANY):
        output_dir = prepared(tmp_path / str(k), is_replaced=is_replaced)
        if not was_killed(lambda output_dir=output_dir: save_the_third(output_dir), k):
            break
        assert all(not verify(checkpoint) for checkpoint in checkpoints(output_dir)), f"operation {k}"
        recovered += len(CheckpointStore(output_dir).recover())
        assert temporaries(output_dir) == [], f"operation {k}"
        found = newest_verified(output_dir)
        assert found.path is not None and found.skipped == () and step_of(found.path) >= 2, f"operation {k}"
        assert is_replaced <= (step_of(found.path) == 3), f"operation {k}: the third was there before"
    else:
        pytest.fail("never came through")
    assert k > 15 and steps(output_dir) == [2, 3]
    assert recovered > 0, "one that only lacked its name was complete"


def test_what_has_a_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files before the manifest, that before its directory, all before the rename, and then the rename itself."""
    done: list[str] = []
    really_fsync, really_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        really_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        done.append("rename")
        really_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    CheckpointStore(tmp_path, record=RECORD).save(3, write)
    staged = ".tmp-checkpoint-3/checkpoint-3"
    files = {f"{staged}/{name}" for name in (*CONTENTS, "run.json")}
    assert set(done[: len(files)]) == files
    assert done[len(files) :] == [f"{staged}/manifest.json", f"{staged}/rollouts", staged, "rename", "."]


def was_killed(action: Callable[[], None], k: int) -> bool:
    """Run `action` in a process of its own that ends at its k-th operation."""
    child = os.fork()
    if child == 0:
        try:
            with FailingDisk(k, is_killed, ("unlink", "rmdir")).in_use():
                action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_what_is_written_half_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1)

    def torch_fails(directory: Path) -> None:
        (directory / "optimizer.pt").write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    with pytest.raises(StorageError) as problem:
        CheckpointStore(tmp_path).save(2, torch_fails)
    assert problem.value.code == "E-STO-01" and "older checkpoints are intact" in problem.value.why
    assert steps(tmp_path) == [1] and temporaries(tmp_path) == []


def test_an_error_that_is_not_the_disks_keeps_its_name(tmp_path: Path) -> None:
    def fails(directory: Path) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        CheckpointStore(tmp_path).save(2, fails)
    assert list(tmp_path.iterdir()) == []


def test_the_name_is_announced_before_anything_is_there(tmp_path: Path) -> None:
    announced: list[str] = []

    def announce(name: str) -> None:
        assert list(tmp_path.iterdir()) == []
        announced.append(name)

    CheckpointStore(tmp_path, announce=announce).save(7, write)
    assert announced == ["checkpoint-7"]


def test_the_limit_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 9, 10)
    CheckpointStore(tmp_path, limit=3).prune(tmp_path / "checkpoint-10", best=str(tmp_path / "checkpoint-2"))
    assert steps(tmp_path) == [2, 9, 10]


def test_the_limit_counts_no_more_than_it_may_remove(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    CheckpointStore(tmp_path, limit=1).prune(tmp_path / "checkpoint-2", best=str(tmp_path / "checkpoint-1"))
    assert steps(tmp_path) == [1, 2]


def test_damaged_ones_go_before_good_ones(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    truncate(tmp_path / "checkpoint-2" / "optimizer.pt")
    CheckpointStore(tmp_path, limit=2).prune(tmp_path / "checkpoint-3")
    assert steps(tmp_path) == [1, 3]


def test_one_of_a_step_that_is_yet_to_come_again_goes_before_older_ones(tmp_path: Path) -> None:
    saved(tmp_path, 3, 4, 9)
    CheckpointStore(tmp_path, limit=2).prune(tmp_path / "checkpoint-4")
    assert steps(tmp_path) == [3, 4]


def test_nothing_is_removed_for_one_that_does_not_verify(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip(tmp_path / "checkpoint-2" / "optimizer.pt")
    with pytest.raises(StorageError, match="does not verify") as problem:
        CheckpointStore(tmp_path, limit=1).prune(tmp_path / "checkpoint-2")
    assert problem.value.code == "E-STO-03" and "optimizer.pt" in problem.value.why
    assert steps(tmp_path) == [1, 2]


def test_directories_that_are_not_ours_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "thesis.tex").write_text("mine")
    saved(tmp_path, 2, 3)
    CheckpointStore(tmp_path, limit=1).prune(tmp_path / "checkpoint-3")
    assert steps(tmp_path) == [1, 3]


def test_a_checkpoint_in_the_way_is_replaced_and_a_users_file_in_it_is_not_lost(tmp_path: Path) -> None:
    (old,) = saved(tmp_path, 3)
    (old / "adapter_model.safetensors").write_bytes(b"damaged")
    (new,) = saved(tmp_path, 3)
    assert verify(new) == [] and [item.name for item in tmp_path.iterdir()] == ["checkpoint-3"]
    (new / "notes.txt").write_text("mine")
    saved(tmp_path, 3)
    assert (tmp_path / "checkpoint-3.replaced-1" / "notes.txt").read_text() == "mine"
    assert verify(tmp_path / "checkpoint-3") == [] and not (tmp_path / "checkpoint-3" / "notes.txt").exists()
    assert steps(tmp_path) == [3], "the one set aside counts no more"


def test_recovery_deletes_what_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / ".tmp-checkpoint-3" / "checkpoint-3").mkdir(parents=True)
    write(tmp_path / ".tmp-checkpoint-3" / "checkpoint-3", CONTENTS)
    assert CheckpointStore(tmp_path).recover() == []
    assert list(tmp_path.iterdir()) == []


class OneOfTwo:
    """A rank whose other rank does well, or fails at everything that they do together."""

    def __init__(self, rank: int, *, other_fails: bool = False) -> None:
        self.is_main = rank == 0
        self._other_fails = other_fails

    def together(self, action: Callable[[], Any]) -> Any:
        result = action()
        if self._other_fails:
            raise PeerError("process 1: full", code="E-STO-01")
        return result

    def alone(self, action: Callable[[], Any]) -> None:
        self.together(action if self.is_main else lambda: None)


def test_ranks_fail_together(tmp_path: Path) -> None:
    def write_nothing(directory: Path) -> None:
        assert directory.is_dir()

    with pytest.raises(PeerError, match="process 1: full") as problem:
        CheckpointStore(tmp_path).save(1, write_nothing, OneOfTwo(0, other_fails=True))
    assert problem.value.code == "E-STO-01" and problem.value.exit_code == 11
    assert list(tmp_path.iterdir()) == []


def test_another_rank_only_writes_its_part(tmp_path: Path) -> None:
    staged = tmp_path / ".tmp-checkpoint-1" / "checkpoint-1"
    staged.mkdir(parents=True)
    CheckpointStore(tmp_path, record=RECORD).save(
        1, lambda directory: (directory / "rng_state_1.pth").write_bytes(b"r") and None, OneOfTwo(1)
    )
    assert [item.name for item in staged.iterdir()] == ["rng_state_1.pth"]
