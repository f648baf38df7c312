"""The config's data sets to the prompts of a run: loaded, transformed, tokenised, limited in length, split."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import datasets
import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from axolotl.core.trainers.grpo.types import PromptRow
from axolotl.data.lengths import limit_lengths, num_prompts
from axolotl.data.messages import checked_prompt
from axolotl.data.sources import load_rows
from axolotl.data.tokenize import IDS, PromptTokenizer, tokenized, tokenized_with_cache
from axolotl.data.transforms import apply_transform
from axolotl.data.view import ConfigView
from axolotl.errors import ConfigError, DataError
from axolotl.utils.imports import search_directories
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import prompt_limit


class PromptRows(Sequence[PromptRow]):
    """Prepared rows in order. `dataset` has the columns `prompt`, `prompt_ids` and those that rewards get."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    @property
    def columns(self) -> tuple[str, ...]:
        """What reward functions get by name."""
        return tuple(name for name in self.dataset.column_names if name not in ("prompt", IDS))

    def digest(self) -> str:
        """Of the prompts' tokens in order: whether two runs train on the same prompts."""
        digest = hashlib.sha256()
        for batch in self.dataset.select_columns([IDS]).iter(1000):
            for ids in batch[IDS]:
                digest.update(json.dumps(ids).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = range(len(self))[index]
        row: dict[str, Any] = self.dataset[number]
        prompt = checked_prompt(row.pop("prompt"), number)
        return PromptRow(index=number, prompt=prompt, ids=tuple(row.pop(IDS)), columns=row)


@dataclass(frozen=True)
class PromptData:
    """train, evaluation: the prompts of the run. notes: lines for its start."""

    train: PromptRows
    evaluation: PromptRows | None
    notes: tuple[str, ...]


def prepare_prompts(config: AxolotlConfig, tokenizer: PreTrainedTokenizerBase, base_dir: Path) -> PromptData:
    """Everything about prompts that is decided once, before training: no prompt in the result exceeds the limit.

    base_dir: the config's directory. Raises `DataError` for data that cannot be used, `ConfigError` for a `datasets:`
    entry that means nothing.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    rows = load_prompts(config, tokenizer, base_dir)
    encode = PromptTokenizer(tokenizer, config.trl.chat_template_kwargs or {})
    notes = []
    if config.dataset_prepared_path and not config.skip_prepare_dataset:
        ids, note = tokenized_with_cache(rows, encode, Path(config.dataset_prepared_path).expanduser())
        notes.append(note)
    else:
        ids = tokenized(rows, encode)
    limit = prompt_limit(config)
    notes.append(_limit_note(config, limit))
    prepared = datasets.concatenate_datasets([rows, ids], axis=1)
    prepared, note = limit_lengths(prepared, IDS, limit, config.long_prompts)
    notes += [note] if note else []
    train, evaluation = split_rows(prepared, config.val_set_size, config.seed)
    counted = f"{num_prompts(len(train))} to train on"
    notes.append(counted + (f", {len(evaluation)} to evaluate on" if evaluation is not None else ""))
    return PromptData(PromptRows(train), None if evaluation is None else PromptRows(evaluation), tuple(notes))


def check_room(prompts: PromptData, config: AxolotlConfig, limit: int, *, name: str, do: str = "") -> None:
    """Raise `ConfigError` before training for what would otherwise end it at the first long prompt.

    limit: tokens of a prompt and a completion together, called `name` in the error. do: how it is raised, with the
    number to follow.
    """
    longest = max(len(ids) for rows in (prompts.train, prompts.evaluation) if rows for ids in rows.dataset[IDS])
    needed = longest + (config.trl.max_completion_length or 0)
    if needed > limit:
        raise ConfigError(
            f"the longest prompt and a completion need {needed} tokens, {name} is {limit}",
            code="E-CFG-14",
            why=f"{longest} tokens of prompt + trl.max_completion_length {config.trl.max_completion_length}",
            do="lower sequence_len or trl.max_completion_length" + (f", or {do} {needed}" if do else ""),
        )


def load_prompts(config: AxolotlConfig, tokenizer: PreTrainedTokenizerBase, base_dir: Path) -> Dataset:
    """The rows of all `datasets:` entries, transformed and put together, in order; `prompt` is a column."""
    if not config.datasets:
        raise ConfigError("datasets: there are none, and training needs prompts", do="add an entry with `path`")
    search = search_directories(base_dir)
    view = ConfigView(config)
    parts = []
    for index, entry in enumerate(config.datasets):
        rows = load_rows(entry, search, f"datasets[{index}]")
        if entry.type:
            rows = apply_transform(rows, entry.type, cfg=view, index=index, tokenizer=tokenizer, search=search)
        parts.append(_with_prompt(rows, entry.path, entry.type))
    return _together(parts, [entry.path for entry in config.datasets])


def split_rows(rows: Dataset, size: float, seed: int) -> tuple[Dataset, Dataset | None]:
    """`rows` without and with the evaluation rows, both in the order they had: `size` is a share below 1, a count from
    1 on, and none at 0. The same seed picks the same rows."""
    if size == 0:
        return rows, None
    count = round(size) if size >= 1 else max(1, round(size * len(rows)))
    if count >= len(rows):
        raise DataError(
            f"val_set_size: {size:g} of {num_prompts(len(rows))} for evaluation leaves none to train on",
            code="E-DAT-04",
            do="use a smaller val_set_size",
        )
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[np.random.default_rng(seed).choice(len(rows), size=count, replace=False)] = True
    return rows.select(np.flatnonzero(~chosen)), rows.select(np.flatnonzero(chosen))


def _with_prompt(rows: Dataset, path: str, transform: str | None) -> Dataset:
    if "prompt" not in rows.column_names:
        has = f"[{', '.join(rows.column_names)}]"
        raise DataError(
            f"{path}: {f'after {transform} ' if transform else ''}there is no column `prompt`; the data set has {has}",
            code="E-DAT-02",
            do="return `prompt` from the transform"
            if transform
            else "name a transform under `type:` that makes `prompt`",
        )
    if IDS in rows.column_names:
        raise DataError(f"{path}: the column name {IDS} is ours", code="E-DAT-02", do="rename or remove it")
    return rows


def _together(parts: Sequence[Dataset], paths: Sequence[str]) -> Dataset:
    first = set(parts[0].column_names)
    for part, path in zip(parts[1:], paths[1:], strict=True):
        differing = sorted(first ^ set(part.column_names))
        if differing:
            raise DataError(
                f"{paths[0]} and {path} do not have the same columns: only one of them has {', '.join(differing)}",
                code="E-DAT-02",
                do="make the transforms return and remove the same columns",
            )
    try:
        return datasets.concatenate_datasets(list(parts)) if len(parts) > 1 else parts[0]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{', '.join(paths)} cannot be put together: a column has another type in one than in another",
            code="E-DAT-02",
            why=" ".join(str(error).split())[:300],
            do="make the transforms return the same types",
        ) from error


def _limit_note(config: AxolotlConfig, limit: int) -> str:
    reasons = [f"sequence_len {config.sequence_len}"]
    if config.vllm.max_model_len is not None:
        room = config.vllm.max_model_len - (config.trl.max_completion_length or 0)
        reasons.append(f"max_model_len {config.vllm.max_model_len} - max_completion_length = {room}")
    return f"prompt limit: {limit} tokens ({'; '.join(reasons)})"
