"""The journal: whole lines or none, on disk in order, and which of them stand after a resume."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from axolotl.core.run import journal as module
from axolotl.core.run.journal import (
    JOURNAL,
    Journal,
    JournalFile,
    StepRecord,
    digest,
    group_records,
    read_journal,
    standing,
    weights_digest,
)
from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow

RECORD = StepRecord(epoch=0, loss=0.5, groups=[{"row": 3}], instances=["a"], ledger={"trained": 4}, weights="77")


def steps(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines]


def test_a_line_a_step(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.begin(0)
    journal.append(1, RECORD)
    journal.append(2, replace(RECORD, loss=math.nan))
    first, second = read_journal(tmp_path / "journal.jsonl")
    assert first == {
        "step": 1,
        "epoch": 0,
        "loss": 0.5,
        "instances": ["a"],
        "groups": [{"row": 3}],
        "ledger": {"trained": 4},
        "weights": "77",
    }
    assert (second["step"], second["loss"]) == (2, None)


def test_every_line_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    synced: list[int] = []
    fsync = os.fsync

    def counted(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        fsync(handle)

    monkeypatch.setattr(module.os, "fsync", counted)
    journal = Journal(path)
    for step in (1, 2):
        journal.append(step, RECORD)
        assert path.stat().st_size in synced


def test_a_resumed_run_supersedes_the_steps_past_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for start, ends in ((0, (1, 2, 3, 4)), (2, (3, 4, 5)), (4, (5, 6))):
        journal = Journal(path)
        journal.begin(start)
        for step in ends:
            journal.append(step, replace(RECORD, loss=float(start)))
    lines = read_journal(path)
    # Nothing is lost, and what stands is each step once.
    assert [line.get("step", -line.get("resumed", 0)) for line in lines] == [1, 2, 3, 4, -2, 3, 4, 5, -4, 5, 6]
    assert steps(standing(lines)) == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in standing(lines)] == [0, 0, 2, 2, 4, 4]


def test_a_run_that_starts_over_supersedes_all(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append(1, RECORD)
    again = Journal(path)
    again.begin(0)
    again.append(1, RECORD)
    assert len(read_journal(path)) == 3
    assert steps(standing(read_journal(path))) == [1]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_cut_off(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(1, RECORD)
    journal.append(2, RECORD)
    os.truncate(path, path.stat().st_size - cut)
    assert steps(read_journal(path)) == [1]
    resumed = Journal(path)
    resumed.begin(1)
    resumed.append(2, RECORD)
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert steps(standing(read_journal(path))) == [1, 2]


def test_a_first_line_that_was_torn_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"step": 1, "ep')
    Journal(path).begin(0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_is_one_warning(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, said.append)
    journal.append(1, RECORD)

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", refuse)
        journal.append(2, RECORD)
        journal.append(3, RECORD)
    # Nothing is left of a line that was not confirmed, and a disk that has room again is used.
    journal.append(4, RECORD)
    assert steps(read_journal(path)) == [1, 4]
    (line,) = said
    assert os.strerror(number) in line and str(path) in line


def test_a_piece_that_could_not_be_taken_back_is_taken_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, lambda _: None)
    journal.append(1, RECORD)
    whole = path.stat().st_size

    def refuse(*_: int) -> None:
        # As if half of the line had got there, and nothing could be done about it.
        os.truncate(path, whole + 7)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", refuse)
        patch.setattr(module.os, "ftruncate", lambda *_: None)
        journal.append(2, RECORD)
    assert path.stat().st_size == whole + 7
    journal.append(3, RECORD)
    assert steps(read_journal(path)) == [1, 3]


def test_a_place_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "missing" / "journal.jsonl", said.append)
    journal.begin(0)
    journal.append(1, RECORD)
    journal.append(2, RECORD)
    assert len(said) == 1


def test_the_callback_writes_before_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """transformers saves after `on_step_end`; the step is the one that just ended."""
    path = tmp_path / JOURNAL
    args, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False), TrainerControl()
    callback = JournalFile(path, lambda: RECORD)
    callback.on_train_begin(args, TrainerState(global_step=0), control)
    callback.on_step_end(args, TrainerState(global_step=1), control)
    resumed = JournalFile(path, lambda: RECORD)
    resumed.on_train_begin(args, TrainerState(global_step=1), control)
    resumed.on_step_end(args, TrainerState(global_step=2), control)
    assert steps(standing(read_journal(path))) == [1, 2]


def test_a_rank_without_a_file_contributes_all_the_same(tmp_path: Path) -> None:
    """What the record takes from all ranks would wait for it."""
    args, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False), TrainerControl()
    asked: list[int] = []
    callback = JournalFile(None, lambda: asked.append(1) or RECORD)  # type: ignore[func-returns-value]
    callback.on_train_begin(args, TrainerState(global_step=0), control)
    callback.on_step_end(args, TrainerState(global_step=1), control)
    assert asked == [1] and list(tmp_path.iterdir()) == []


def group(row: int, ids: list[tuple[int, ...]], version: int, reroll: int = 0) -> CompletionGroup:
    completions = tuple(Completion(i, None, False, version, "a") for i in ids)
    return CompletionGroup(PromptRow(row, "p", (1, 2), {}), completions, reroll)


def test_the_record_of_a_group_tells_prompts_versions_tokens_and_rewards_apart() -> None:
    groups = [group(7, [(5,), (6, 7)], 3), group(2, [(5,), (6, 7)], 2, reroll=1), group(7, [(5, 6), (7,)], 3)]
    batch = collate(groups, pad_token_id=0, eos_token_id=1)
    rewards = torch.tensor([[1.0], [0.0], [1.0], [math.nan], [1.0], [0.0]])
    first, second, third = group_records(batch, rewards, origins=["fresh", "replayed", "fresh"])
    assert [(r["row"], r["reroll"], r["origin"], r["versions"]) for r in (first, second)] == [
        (7, 0, "fresh", [3, 3]),
        (2, 1, "replayed", [2, 2]),
    ]
    assert first["completions"] == second["completions"] == digest(b"[[5], [6, 7]]")
    assert third["completions"] != first["completions"]
    assert first["rewards"] == third["rewards"] != second["rewards"]
    assert [r["origin"] for r in group_records(batch, rewards)] == ["fresh"] * 3


def test_the_digest_of_weights_sees_one_bit_of_what_is_trained() -> None:
    trained = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    before = weights_digest([("a", trained), ("b", frozen)])
    frozen.data += 1
    assert weights_digest([("b", frozen), ("a", trained)]) == before
    trained.data[1] = 1.0078125
    assert weights_digest([("a", trained), ("b", frozen)]) != before
    assert weights_digest([("a", trained)], limit=5) is None
