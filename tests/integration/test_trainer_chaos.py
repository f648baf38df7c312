"""Short forms of what `make chaos` and `make soak` do to training runs; damaged checkpoints of such runs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from axolotl.core.run.checkpoints.finding import newest_verified
from axolotl.failpoints import POINTS
from tests.campaigns import trainer_soak
from tests.campaigns.trainer_chaos import (
    MODES,
    STEPS,
    Calm,
    Ground,
    Kill,
    assert_same_end,
    calm_runs,
    failpoint_kills,
    ground,
    random_kills,
    survive,
)
from tests.support.checkpoints import DAMAGES

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Ground]:
    with ground(tmp_path_factory.mktemp("ground"), tiny_model) as found:
        yield found


@pytest.fixture(scope="module")
def calm(place: Ground) -> dict[str, Calm]:
    return calm_runs(place)


# Where state is made, is half on the disk, is named, and is told to the server.
KILLS = [
    Kill("async", point="gen.partial", nth=9),
    Kill("async", point="ckpt.before_rename", nth=2),
    Kill("in turn", point="step.after_opt", nth=5),
    Kill("iterated", point="step.after_journal", nth=5),
    Kill("async", share=0.7),
]


def test_five_killed_runs_end_as_if_nothing_had_happened(place: Ground, calm: dict[str, Calm]) -> None:
    result = survive(KILLS, place, calm, random.Random(0))
    assert not result.problems, "\n".join(result.problems)
    assert result.survived == 5


def test_any_damaged_file_of_a_checkpoint_is_named_and_the_one_before_is_used(
    calm: dict[str, Calm], tmp_path: Path
) -> None:
    out = calm["async"].directory / "out"
    newest, before = tmp_path / f"checkpoint-{STEPS}", tmp_path / f"checkpoint-{STEPS - 2}"
    for checkpoint in (newest, before):
        shutil.copytree(out / checkpoint.name, checkpoint)
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    assert {"pending.safetensors", "replay.safetensors", "ledger.json"} <= {path.name for path in files}
    for file in files:
        whole = file.read_bytes()
        for damage in DAMAGES:
            damage(file)
            found = newest_verified(tmp_path)
            (skipped,) = found.skipped
            assert found.path == before, (file, damage)
            assert skipped.problems[0].file == file.relative_to(newest).as_posix(), (file, damage)
            file.write_bytes(whole)
    assert newest_verified(tmp_path).path == newest


def test_the_whole_campaign_comes_to_every_point_in_every_mode() -> None:
    kills = failpoint_kills(random.Random(0))
    assert {(kill.mode, kill.point) for kill in kills} == {(mode, point) for mode in MODES for point in POINTS}
    assert {kill.mode for kill in random_kills(30, random.Random(0))} == set(MODES)


def test_what_is_compared_is_not_always_equal(calm: dict[str, Calm]) -> None:
    with pytest.raises(AssertionError, match="and without kills"):
        assert_same_end(calm["async"].directory / "out", calm["in turn"].directory / "out")


def test_nothing_piles_up_over_sixty_steps(place: Ground) -> None:
    report = trainer_soak.run(place, 60)
    assert not report.problems(with_memory=False), report
    assert len(report.samples) > 20
