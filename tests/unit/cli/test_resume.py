"""Which checkpoint `--resume` takes, and what it refuses. Whole runs are in `tests/integration/test_resume.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.cli.resume import check_data, find_checkpoint, resume_wanted, run_record
from axolotl.core.run.checkpoints.store import CheckpointStore
from axolotl.errors import ConfigError, StorageError
from axolotl.utils.schemas.config import AxolotlConfig
from tests.support.checkpoints import CONTENTS, flip, saved, truncate, write


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AxolotlConfig:
    monkeypatch.chdir(tmp_path)
    return make()


def make(**options: Any) -> AxolotlConfig:
    trl = {"reward_funcs": ["r.f"], "num_generations": 2}
    datasets = [{"path": "a"}]
    base = {"base_model": "m", "rl": "grpo", "trl": trl, "datasets": datasets, "micro_batch_size": 2}
    return config_from_mapping({**base, "output_dir": "out", **options})


def test_the_newest_that_verifies_is_taken_and_the_others_are_named(
    config: AxolotlConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    _, second, third = saved(Path("out"), 1, 2, 3, record=run_record(config, "d"))
    flip(third / "optimizer.pt")
    assert find_checkpoint(config, True) == second
    assert capsys.readouterr().err.splitlines() == [
        "skipping out/checkpoint-3: optimizer.pt has other contents than were saved",
        "resuming from out/checkpoint-2",
    ]


def test_the_one_that_is_named_is_taken_or_refused(config: AxolotlConfig) -> None:
    first, second = saved(Path("out"), 1, 2, record=run_record(config))
    assert find_checkpoint(config, str(first)) == first
    truncate(second / "optimizer.pt")
    with pytest.raises(StorageError) as problem:
        find_checkpoint(config, str(second))
    assert problem.value.code == "E-STO-03" and "optimizer.pt has 200 bytes" in problem.value.why


ROLLOUT_OF_FOUR = {"trl": {"reward_funcs": ["r.f"], "num_generations": 2, "num_iterations": 4}}


def save_rollout(config: AxolotlConfig, step: int, *names: str) -> Path:
    """A checkpoint that verifies, with these files of its rollout."""
    store = CheckpointStore(Path("out"), record=run_record(config))
    contents = {**CONTENTS, **{f"rollouts/rank-0/{name}": b"{}" for name in names}}

    def with_rollout(directory: Path) -> None:
        (directory / "rollouts" / "rank-0").mkdir(parents=True)
        write(directory, contents)

    return store.save(step, with_rollout)


def test_in_the_middle_of_a_rollout_the_rollout_is_part_of_the_checkpoint(
    config: AxolotlConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rollouts of four steps: after steps 4 and 8 none is open."""
    config = make(**ROLLOUT_OF_FOUR)
    begun = save_rollout(config, 4)
    assert find_checkpoint(config, True) == begun
    middle = save_rollout(config, 5, "open.json", "open.safetensors")
    assert find_checkpoint(config, True) == middle
    half, nothing = save_rollout(config, 6, "open.json"), save_rollout(config, 7)
    capsys.readouterr()
    assert find_checkpoint(config, True) == middle
    assert capsys.readouterr().err.splitlines()[:2] == [
        "skipping out/checkpoint-7: rollouts/rank-0/open.json was not saved; rollouts/rank-0/open.safetensors was not "
        "saved",
        "skipping out/checkpoint-6: rollouts/rank-0/open.safetensors was not saved",
    ]
    for checkpoint in (half, nothing):
        with pytest.raises(StorageError, match="cannot be gone on from") as problem:
            find_checkpoint(config, str(checkpoint))
        assert problem.value.code == "E-STO-03" and "rollouts/rank-0/open." in problem.value.why


def test_other_settings_are_refused_and_not_taken_for_a_damaged_rollout(config: AxolotlConfig) -> None:
    saved(Path("out"), 1, record=run_record(config))
    with pytest.raises(ConfigError) as problem:
        find_checkpoint(make(**ROLLOUT_OF_FOUR), True)
    assert problem.value.code == "E-CFG-32" and "trl.num_iterations: 1 -> 4" in problem.value.details


def test_when_none_verifies_the_run_does_not_start_over_silently(config: AxolotlConfig) -> None:
    for checkpoint in saved(Path("out"), 1, 2, record=run_record(config)):
        (checkpoint / "manifest.json").unlink()
    with pytest.raises(StorageError) as problem:
        find_checkpoint(config, True)
    assert problem.value.exit_code == 9 and "older version of axolotl" in problem.value.why


@pytest.mark.parametrize("resume", [True, "out/checkpoint-7"])
def test_when_there_is_none(config: AxolotlConfig, resume: bool | str) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        find_checkpoint(config, resume)


def test_settings_that_matter_are_listed_and_others_are_told(
    config: AxolotlConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(Path("out"), 1, record=run_record(config))
    with pytest.raises(ConfigError) as problem:
        find_checkpoint(make(seed=1, lora_r=4, save_steps=2), True)
    assert problem.value.code == "E-CFG-32"
    assert problem.value.details == ("lora_r: 8 -> 4", "seed: 42 -> 1")
    assert find_checkpoint(make(save_steps=2), True) is not None
    assert "changed since then: save_steps: null -> 2" in capsys.readouterr().err


def test_other_prompts_are_another_run(config: AxolotlConfig) -> None:
    (checkpoint,) = saved(Path("out"), 1, record=run_record(config, "some"))
    check_data(checkpoint, config, "some")
    with pytest.raises(ConfigError) as problem:
        check_data(checkpoint, config, "others")
    assert problem.value.code == "E-CFG-32" and "datasets" in problem.value.details[0]


def test_who_asks_for_a_resume(config: AxolotlConfig) -> None:
    automatic = make(auto_resume_from_checkpoints=True)
    assert resume_wanted(automatic, resume=False, overwrite=False) is False
    assert resume_wanted(config, resume="there", overwrite=False) == "there"
    saved(Path("out"), 1)
    assert resume_wanted(config, resume=False, overwrite=False) is False
    assert resume_wanted(automatic, resume=False, overwrite=False) is True
    with pytest.raises(ConfigError, match="contradict"):
        resume_wanted(config, resume=True, overwrite=True)
