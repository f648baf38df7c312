"""Every way a file can differ from what was saved is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from axolotl.core.run.checkpoints.manifest import MANIFEST, seal, verify
from tests.support.checkpoints import CONTENTS, DAMAGES, flip, remove, saved, truncate


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path, 4)[0]


def test_what_was_saved_verifies(checkpoint: Path) -> None:
    assert verify(checkpoint) == []
    listed = json.loads((checkpoint / MANIFEST).read_text())
    assert listed["step"] == 4
    assert listed["files"].keys() == CONTENTS.keys() | {"run.json"}
    assert listed["files"]["scheduler.pt"]["bytes"] == len(b"schedule")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*CONTENTS, "run.json", MANIFEST])
def test_a_damaged_file_is_named(checkpoint: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(checkpoint / name)
    problems = verify(checkpoint)
    assert [problem.file for problem in problems] == [name]


def test_any_byte_of_the_manifest_counts(checkpoint: Path) -> None:
    whole = (checkpoint / MANIFEST).read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        (checkpoint / MANIFEST).write_bytes(changed)
        assert verify(checkpoint, contents=False), f"byte {position}"


def test_several_damages_are_all_named(checkpoint: Path) -> None:
    truncate(checkpoint / "optimizer.pt")
    remove(checkpoint / "scheduler.pt")
    flip(checkpoint / "adapter_model.safetensors")
    assert [str(problem) for problem in verify(checkpoint)] == [
        "adapter_model.safetensors has other contents than were saved",
        "optimizer.pt has 200 bytes instead of 400",
        "scheduler.pt is missing",
    ]


def test_without_the_contents_a_flipped_byte_is_not_seen_and_a_length_is(checkpoint: Path) -> None:
    flip(checkpoint / "optimizer.pt")
    assert verify(checkpoint, contents=False) == []
    truncate(checkpoint / "optimizer.pt")
    assert [problem.file for problem in verify(checkpoint, contents=False)] == ["optimizer.pt"]


def test_files_of_somebody_else_do_not_matter(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("mine")
    assert verify(checkpoint) == []


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert verify(tmp_path / "nothing")[0].what == "is missing"
    assert verify(tmp_path / "file")[0].file == MANIFEST


def test_a_manifest_cannot_lead_out_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "secret").write_text("x")
    monkeypatch.setattr("axolotl.core.run.checkpoints.manifest._files", lambda directory: iter(["../secret"]))
    seal(tmp_path / "checkpoint-1", 1)
    assert "outside" in verify(tmp_path / "checkpoint-1")[0].what
