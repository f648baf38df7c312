"""`journal.jsonl`: one line an optimizer step, on disk before the next one begins; what the run did, in order.

    {"step": 7, "epoch": 0, "loss": 0.01, "instances": ["3f2a"], "ledger": {...}, "weights": "77d0...", "groups": [
     {"row": 12, "reroll": 0, "origin": "fresh", "versions": [7, 7], "completions": "9c1e...", "rewards": "04ab..."}]}
    {"resumed": 4}

Lines are only ever added. A resumed run adds `resumed` with the step of its checkpoint: of the lines before it, those
of later steps are superseded, since their weights are gone (`standing`). A last line that a crash tore is cut off when
the file is next opened. A line that the disk refuses is one warning, and its step is missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from axolotl.core.trainers.grpo.types import RolloutBatch
from axolotl.failpoints import point

JOURNAL = "journal.jsonl"

# About a hundredth of a second to hash.
MAX_DIGEST_BYTES = 8 << 20


@dataclass(frozen=True)
class StepRecord:
    """What a line holds beside the step. groups: see `group_records`. weights: see `weights_digest`."""

    epoch: int
    loss: float
    groups: Sequence[Mapping[str, Any]]
    instances: Sequence[str]
    ledger: Mapping[str, int] = field(default_factory=dict)
    weights: str | None = None


def group_records(
    batch: RolloutBatch, rewards: torch.Tensor, *, origins: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """One record a group: its prompt, the versions that sampled it, digests of its tokens and of its rewards.

    Args:
        rewards: `[N, F]`, NaN where a function abstained.
        origins: a word for each group, such as `replayed`; `fresh` for all when None.
    """
    size = batch.group_size
    words = origins or ["fresh"] * len(batch.groups)
    return [
        {
            "row": group.row.index,
            "reroll": group.reroll,
            "origin": origin,
            "versions": [completion.adapter_version for completion in group.completions],
            "completions": digest(json.dumps([completion.ids for completion in group.completions]).encode()),
            "rewards": digest(json.dumps(rewards[number * size : (number + 1) * size].tolist()).encode()),
        }
        for number, (group, origin) in enumerate(zip(batch.groups, words, strict=True))
    ]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def weights_digest(parameters: Iterable[tuple[str, torch.Tensor]], limit: int = MAX_DIGEST_BYTES) -> str | None:
    """Of names and exact values of what is trained; None where that is more than `limit` bytes."""
    trained = sorted((name, value) for name, value in parameters if value.requires_grad)
    if sum(value.nbytes for _, value in trained) > limit:
        return None
    running = hashlib.blake2b(digest_size=8)
    for name, value in trained:
        running.update(name.encode())
        running.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return running.hexdigest()


class Journal:
    """The file. Every line is on disk when `append` returns."""

    def __init__(self, path: Path, warn: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._warn = warn or _to_stderr
        self._has_warned = False
        self._end: int | None = None

    def begin(self, step: int) -> None:
        """A run starts, or goes on, after optimizer step `step`: cut off a torn line, and say what no longer stands."""
        try:
            if self._path.exists():
                _cut_torn_line(self._path)
            if self._path.exists() and self._path.stat().st_size:
                self._write({"resumed": step})
        except OSError as problem:
            self._refused(problem)

    def append(self, step: int, record: StepRecord) -> None:
        loss = record.loss if math.isfinite(record.loss) else None
        line: dict[str, Any] = {"step": step, "epoch": record.epoch, "loss": loss, "instances": list(record.instances)}
        line |= {"groups": [dict(group) for group in record.groups], "ledger": dict(record.ledger)}
        try:
            self._write({**line, "weights": record.weights})
        except OSError as problem:
            self._refused(problem)

    def _write(self, line: Mapping[str, Any]) -> None:
        """All of the line or nothing of it."""
        data = json.dumps(line).encode() + b"\n"
        is_new = not self._path.exists()
        with self._path.open("ab", buffering=0) as file:
            if self._end is None:
                self._end = os.fstat(file.fileno()).st_size
            # What is beyond is a piece of a line that could not even be taken back.
            os.ftruncate(file.fileno(), self._end)
            try:
                if file.write(data) != len(data):
                    raise OSError("the line was written in part")
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), self._end)
                raise
            self._end += len(data)
        if is_new:
            _sync_directory(self._path.parent)

    def _refused(self, problem: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"warning: {self._path} could not be written ({problem.strerror or problem}); training goes on, and "
                "the journal lacks such steps"
            )


class JournalFile(TrainerCallback):
    """Adds a line at the end of every optimizer step, before a checkpoint of that step is saved.

    path: None on the ranks that only contribute to the record. record: what the step that just ended did; collective,
    called on the main thread.
    """

    def __init__(self, path: Path | None, record: Callable[[], StepRecord]) -> None:
        self._journal = Journal(path) if path is not None else None
        self._record = record

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._journal is not None:
            self._journal.begin(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        record = self._record()
        if self._journal is not None:
            self._journal.append(state.global_step, record)
        point("step.after_journal")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every line, superseded ones included; a torn last one is left out."""
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def standing(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that the final weights are made of, in order."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if "resumed" in line:
            kept = [earlier for earlier in kept if earlier["step"] <= line["resumed"]]
        else:
            kept.append(line)
    return kept


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
