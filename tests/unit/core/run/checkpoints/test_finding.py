from collections.abc import Callable
from pathlib import Path

import pytest

from axolotl.core.run.checkpoints.finding import newest_verified, why_not
from axolotl.core.run.checkpoints.store import CheckpointStore
from tests.support.checkpoints import CONTENTS, DAMAGES, saved, write


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_that_verifies_and_why_newer_ones_do_not(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    saved(tmp_path, 9, 10, 11)
    damage(tmp_path / "checkpoint-11" / "optimizer.pt")
    damage(tmp_path / "checkpoint-10" / "manifest.json")
    found = newest_verified(tmp_path)
    assert found.path == tmp_path / "checkpoint-9"
    first, second = (str(skipped) for skipped in found.skipped)
    assert "checkpoint-11: optimizer.pt " in first and "checkpoint-10: manifest.json " in second


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert newest_verified(tmp_path / "nowhere").path is None
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    found = newest_verified(tmp_path)
    assert found.path is None and len(found.skipped) == 1
    assert "older version of axolotl" in str(found.skipped[0])


def test_weights_alone_are_no_state_of_a_run(tmp_path: Path) -> None:
    contents = {name: CONTENTS[name] for name in ("adapter_model.safetensors", "trainer_state.json")}
    checkpoint = CheckpointStore(tmp_path).save(3, lambda directory: write(directory, contents))
    assert [problem.file for problem in why_not(checkpoint)] == ["optimizer.pt", "scheduler.pt"]
    assert "save_only_model" in str(why_not(checkpoint)[0])
