"""`axolotl train` in two processes: one run, one output directory, one end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from axolotl.core.run.checkpoints.manifest import verify
from axolotl.core.run.journal import read_journal, standing
from axolotl.failpoints import VARIABLE
from tests.support.cli import environment, free_port
from tests.support.disturbed import wait_until
from tests.support.forked import Forked, forked_ranks
from tests.support.project import make_project, metrics

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 4
# What two ranks that see one of them end take at most.
PEACE_S = 30.0

TROUBLE = """

import os


def sometimes(completions, trainer_state=None, **kwargs):
    if os.environ.get("RAISES_AT") == str(trainer_state.global_step):
        raise KeyError("answer")
    return vowels(completions)
"""

SAVE = ("--save_strategy", "steps", "--save_steps", "2")


def project(directory: Path, model: Path, **overrides: object) -> Path:
    settings = {"num_questions": 13, "max_steps": STEPS, "trl__reward_funcs": ["project_rewards.sometimes"]}
    make_project(directory, model, **{**settings, **overrides})
    with (directory / "project_rewards.py").open("a") as file:
        file.write(TROUBLE)
    return directory


def ends(ranks: list[Forked], timeout_s: float = 200.0) -> list[int | None]:
    return [rank.wait(timeout_s) for rank in ranks]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The directory of a run that nothing disturbed, started as users do; `said.log` has what it printed."""
    directory = project(tmp_path_factory.mktemp("calm"), tiny_model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "axolotl.cli.main", "train", "config.yaml", *SAVE]
    done = subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    (directory / "said.log").write_text(done.stdout + done.stderr)
    return directory


@pytest.fixture
def copy(calm: Path, tmp_path: Path) -> Path:
    """The project without what the run wrote."""
    for name in ("config.yaml", "project_rewards.py", "questions.jsonl"):
        shutil.copy(calm / name, tmp_path)
    return tmp_path


def story(directory: Path) -> list[tuple[int, object, object]]:
    lines = standing(read_journal(directory / "out" / "journal.jsonl"))
    return [(line["step"], line["groups"], line["weights"]) for line in lines]


def test_the_output_is_written_once_and_tells_of_all_ranks(calm: Path) -> None:
    out = calm / "out"
    assert [step["step"] for step in metrics(out)] == [1, 2, 3, 4]
    lines = read_journal(out / "journal.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    rows = [[group["row"] for group in line["groups"]] for line in lines]
    assert all(len(set(pair)) == 2 for pair in rows), "each rank has a prompt of its own"
    assert len({row for pair in rows for row in pair}) == 8
    assert all(sum(line["ledger"].values()) == 8 for line in lines)
    counted = [sum(value for name, value in step.items() if name.startswith("ledger/")) for step in metrics(out)]
    assert counted == [8.0] * STEPS
    assert [path.name for path in out.glob("journal*")] == ["journal.jsonl"]
    said = (calm / "said.log").read_text()
    assert said.count("done: 4 steps") == said.count("1 of 13 prompts do not fill a step") == 1


def test_a_checkpoint_holds_what_each_rank_needs(calm: Path) -> None:
    checkpoint = calm / "out" / "checkpoint-4"
    assert verify(checkpoint) == []
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert {f"rng_state_{rank}.pth" for rank in (0, 1)} <= names
    assert {f"rollouts/rank-{rank}/ledger.json" for rank in (0, 1)} <= names


def test_a_killed_rank_ends_the_run_and_a_resumed_one_ends_as_if_nothing_had_happened(calm: Path, copy: Path) -> None:
    with forked_ranks(copy, "train", "config.yaml", *SAVE, only={1: {VARIABLE: "step.before_opt=kill@4"}}) as ranks:
        assert ranks[1].wait(200) == -signal.SIGKILL
        assert ranks[0].wait(PEACE_S) == 11 and "E-PEER-01" in ranks[0].output
    assert json.loads((copy / "out" / "last_error.json").read_text())["code"] == "E-PEER-01"
    with forked_ranks(copy, "train", "config.yaml", *SAVE, "--resume") as ranks:
        assert ends(ranks) == [0, 0], ranks[0].output + ranks[1].output
        assert "resuming from out/checkpoint-2" in ranks[0].output
    assert story(copy) == story(calm)
    ours, theirs = (load_file(place / "out" / "adapter_model.safetensors") for place in (copy, calm))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_reward_that_raises_on_one_rank_ends_both_with_its_code(copy: Path) -> None:
    with forked_ranks(copy, "train", "config.yaml", only={1: {"RAISES_AT": "2"}}) as ranks:
        assert ranks[1].wait(200) == 5
        assert ranks[0].wait(PEACE_S) == 11
        assert "E-RWD-02  process 1: " in ranks[0].output and "E-RWD-02  " in ranks[1].output
    assert json.loads((copy / "out" / "last_error.json").read_text())["code"] == "E-RWD-02"


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(copy: Path) -> None:
    with forked_ranks(copy, "train", "config.yaml", "--max_steps", "2000") as ranks:
        journal = copy / "out" / "journal.jsonl"
        wait_until(lambda: journal.is_file() and len(read_journal(journal)) >= 2, "two steps", 200.0)
        ranks[1].terminate()
        began = time.monotonic()
        assert ends(ranks, PEACE_S) == [143, 143], ranks[0].output + ranks[1].output
        assert time.monotonic() - began < PEACE_S
    (checkpoint,) = (copy / "out").glob("checkpoint-*")
    assert verify(checkpoint) == []


def test_ranks_that_read_other_prompts_are_refused(copy: Path) -> None:
    with (copy / "project_rewards.py").open("a") as file:
        file.write("\n\n_transform = prompt_transform\n\n\ndef prompt_transform(cfg, *args, **kwargs):\n")
        file.write("    to_prompt, options = _transform(cfg)\n")
        file.write("    def other(example, tokenizer=None):\n")
        file.write("        return to_prompt({**example, 'question': example['question'] + os.environ['RANK']})\n")
        file.write("    return other, options\n")
    with forked_ranks(copy, "train", "config.yaml") as ranks:
        assert ends(ranks) == [4, 4]
        assert "E-DAT-08" in ranks[0].output and "E-DAT-08" in ranks[1].output


def test_all_weights_may_be_trained(copy: Path) -> None:
    """In process; that the ranks agree on the weights is checked at every step."""
    flags = ("--adapter", "null", "--lora_r", "null", "--lora_alpha", "null", "--lora_target_linear", "null")
    with forked_ranks(copy, "train", "config.yaml", "--max_steps", "2", "--trl.beta", "0.1", *flags) as ranks:
        assert ends(ranks) == [0, 0], ranks[0].output + ranks[1].output
    assert (copy / "out" / "model.safetensors").is_file()


def test_every_rank_asks_the_server_that_the_first_one_starts(tmp_path: Path, tiny_model: Path) -> None:
    """Ahead, with replay, re-roll and skipped groups, under one claim."""
    project(
        tmp_path,
        tiny_model,
        trl__use_vllm=True,
        trl__vllm_lora_sync=True,
        trl__use_data_producer=True,
        trl__async_prefetch=True,
        trl__replay_buffer_size=3,
        trl__reroll_start_fraction=0.3,
        trl__skip_zero_advantage_batches=True,
        vllm={"port": free_port(), "managed": True, "engine": "transformers", "sync_dir": "sync"},
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=4,
    )
    with forked_ranks(tmp_path, "train", "config.yaml") as ranks:
        assert ends(ranks, 280.0) == [0, 0], ranks[0].output + ranks[1].output
        assert "generating with" in ranks[0].output and "generating with" not in ranks[1].output
    steps = metrics(tmp_path / "out")
    assert [step["staleness/max"] for step in steps] == [0, 1, 1, 1]
    assert 1 <= max(step["replay/size"] for step in steps) <= 3, "a total over both"
    lines = read_journal(tmp_path / "out" / "journal.jsonl")
    assert [len(line["groups"]) for line in lines] == [4] * STEPS
    assert len({instance for line in lines for instance in line["instances"]}) == 1
