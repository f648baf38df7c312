"""Groups as files: JSON for what is small, safetensors for tokens and log-probs, and no pickle.

The prompt itself is not stored, only its row number and a digest of its tokens: the data set has it, with columns that
JSON could not hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow
from axolotl.errors import DataError

Record = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def write_state(directory: Path, name: str, record: Any, tensors: Tensors) -> None:
    """`name`.json and `name`.safetensors in `directory`, which exists. Syncing to disk is the checkpoint's work."""
    text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    save_file(tensors, directory / f"{name}.safetensors")


def read_state(directory: Path, name: str) -> tuple[Any, Tensors]:
    """What `write_state` wrote."""
    record = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    return record, load_file(directory / f"{name}.safetensors")


def pack_groups(groups: Sequence[CompletionGroup]) -> tuple[list[Record], Tensors]:
    """One JSON record a group, and all tokens and log-probs in a row; `unpack_groups` is its exact inverse."""
    completions = [completion for group in groups for completion in group.completions]
    ids = [token for completion in completions for token in completion.ids]
    logprobs = [value for completion in completions for value in completion.logprobs or ()]
    tensors = {
        "completion_ids": torch.tensor(ids, dtype=torch.int64),
        # They came as doubles of a JSON text; a float32 would not be the same number.
        "sampling_logps": torch.tensor(logprobs, dtype=torch.float64),
    }
    return [_record(group) for group in groups], tensors


def unpack_groups(records: Sequence[Record], tensors: Tensors, rows: Sequence[PromptRow]) -> list[CompletionGroup]:
    """The groups again.

    Args:
        rows: the data set of the run. Raises `DataError` `E-DAT-07` when a prompt is not the one that was stored.
    """
    ids = Cut(tensors["completion_ids"])
    logprobs = Cut(tensors["sampling_logps"])
    return [_group(record, ids, logprobs, rows) for record in records]


class Cut:
    """A row of numbers handed out piece by piece."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values: list[Any] = values.tolist()
        self._position = 0

    def next(self, count: int) -> tuple[Any, ...]:
        start, self._position = self._position, self._position + count
        piece = tuple(self._values[start : self._position])
        assert len(piece) == count, (len(piece), count)
        return piece


def _record(group: CompletionGroup) -> Record:
    return {
        "row": group.row.index,
        "prompt": _digest(group.row.ids),
        "reroll": group.reroll,
        "completions": [
            {
                "tokens": len(completion.ids),
                "has_logprobs": completion.logprobs is not None,
                "is_truncated": completion.is_truncated,
                "adapter_version": completion.adapter_version,
                "instance_id": completion.instance_id,
                "is_renormalised": completion.is_renormalised,
            }
            for completion in group.completions
        ],
    }


def _group(record: Record, ids: Cut, logprobs: Cut, rows: Sequence[PromptRow]) -> CompletionGroup:
    completions = tuple(
        Completion(
            ids=ids.next(entry["tokens"]),
            logprobs=logprobs.next(entry["tokens"]) if entry["has_logprobs"] else None,
            is_truncated=entry["is_truncated"],
            adapter_version=entry["adapter_version"],
            instance_id=entry["instance_id"],
            is_renormalised=entry["is_renormalised"],
        )
        for entry in record["completions"]
    )
    return CompletionGroup(_row(record, rows), completions, reroll=record["reroll"])


def _row(record: Record, rows: Sequence[PromptRow]) -> PromptRow:
    index: int = record["row"]
    if index < len(rows) and _digest((row := rows[index]).ids) == record["prompt"]:
        return row
    raise DataError(
        f"row {index} of the data set is not the prompt that the checkpoint's completions answer",
        code="E-DAT-07",
        why="the data set, its transform or the tokenizer changed since the checkpoint was written",
        do="resume with the data of the run, or start again with --overwrite",
    )


def _digest(ids: Sequence[int]) -> str:
    return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=8).hexdigest()
