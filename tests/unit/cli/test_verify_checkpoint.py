"""`axolotl verify-checkpoint`: what it says and how it exits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from axolotl.cli.main import main
from tests.support.checkpoints import DAMAGES, saved


def test_a_directory_of_good_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 2, 10)
    assert main(["verify-checkpoint", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "checkpoint-2: complete, 6 files" in first and "checkpoint-10: complete" in second


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_with_its_file(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 2, 10)
    damage(tmp_path / "checkpoint-10" / "rollouts" / "rank-0.json")
    assert main(["verify-checkpoint", str(tmp_path / "checkpoint-2")]) == 0
    capsys.readouterr()
    assert main(["verify-checkpoint", str(tmp_path)]) == 9
    said = capsys.readouterr()
    assert "checkpoint-10: damaged\n  rollouts/rank-0.json " in said.out
    assert "E-STO-03  1 of 2 checkpoints" in said.err


def test_one_of_an_older_version_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved(tmp_path, 2)[0] / "manifest.json").unlink()
    assert main(["verify-checkpoint", str(tmp_path / "checkpoint-2")]) == 9
    assert "saved by an older version of axolotl" in capsys.readouterr().out


def test_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert main(["verify-checkpoint", str(place)]) == 2
        assert "is no checkpoint and holds none" in capsys.readouterr().err
