"""Prompts to token ids, under the tokenizer's real chat template, with a cache between runs."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import transformers
from datasets import Dataset, Features, List, Value, load_from_disk
from transformers import PreTrainedTokenizerBase

from axolotl.core.trainers.grpo.types import Messages, Prompt
from axolotl.data.messages import checked_prompt
from axolotl.errors import DataError, StorageError

IDS = "prompt_ids"
"""The column that holds the tokens of `prompt`."""

_BATCH = 1000
_FEATURES = Features({IDS: List(Value("int32"))})


@dataclass(frozen=True)
class PromptTokenizer:
    """tokenizer and the variables that its chat template gets besides the messages."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any]

    def __call__(self, prompts: list[Prompt], first_row: int) -> list[list[int]]:
        """Token ids of `prompts`, which start at row `first_row`: text as it is, messages under the chat template with
        the opening of the assistant's turn."""
        is_text = isinstance(prompts[0], str)
        texts = [self._rendered(prompt, first_row + i) for i, prompt in enumerate(prompts)]
        encoded = self.tokenizer(texts, add_special_tokens=is_text, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        for i, ids in enumerate(encoded):
            if not ids:
                raise DataError(f"row {first_row + i}: `prompt` is empty: it has no tokens", code="E-DAT-03")
        return list(encoded)

    def _rendered(self, prompt: Prompt, row: int) -> str:
        return prompt if isinstance(prompt, str) else self._under_template(prompt, row)

    def _under_template(self, messages: Messages, row: int) -> str:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "prompts are messages, and the tokenizer has no chat template to write them with",
                why="with chat_template: tokenizer_default the model's own is used, and this model has none",
                do="set chat_template to a shipped name such as chatml or to a Jinja file, or make `prompt` text",
            )
        variables = {"add_generation_prompt": True, **self.template_kwargs, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **variables))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"row {row}: the chat template cannot write `prompt`: {error}",
                code="E-DAT-03",
                why=f"its messages have the roles {[message['role'] for message in messages]}",
                do="correct the messages, trl.chat_template_kwargs, or chat_template",
            ) from error

    def fingerprint(self) -> str:
        """Changes whenever the same prompt could get other ids."""
        backend = self.tokenizer.backend_tokenizer if self.tokenizer.is_fast else None
        parts = {
            "tokens": backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items()),
            "special": {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()},
            "template": self.tokenizer.chat_template,
            "variables": dict(self.template_kwargs),
            "transformers": transformers.__version__,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def tokenized(rows: Dataset, tokenizer: PromptTokenizer) -> Dataset:
    """One column `prompt_ids`, one row for each of `rows`; every prompt is checked on the way."""

    kind = type(rows[0]["prompt"])

    def encode(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[list[int]]]:
        prompts = [checked_prompt(value, row) for value, row in zip(batch["prompt"], numbers, strict=True)]
        for prompt, row in zip(prompts, numbers, strict=True):
            if type(prompt) is not kind:
                raise DataError(
                    f"row {row}: `prompt` is {_kind(prompt)}, unlike that of row 0",
                    code="E-DAT-03",
                    do="make every prompt text, or every prompt a list of messages",
                )
        return {IDS: tokenizer(prompts, numbers[0])}

    return rows.select_columns(["prompt"]).map(
        encode,
        batched=True,
        batch_size=_BATCH,
        with_indices=True,
        remove_columns=["prompt"],
        features=_FEATURES,
        keep_in_memory=True,
        new_fingerprint=secrets.token_hex(8),
        desc="Tokenising prompts",
    )


def _kind(prompt: Prompt) -> str:
    return "text" if isinstance(prompt, str) else "a list of messages"


def tokenized_with_cache(rows: Dataset, tokenizer: PromptTokenizer, directory: Path) -> tuple[Dataset, str]:
    """Like `tokenized`, from `directory` when an earlier run left the ids of the same prompts there, and a line saying
    which. Ids are kept at full length, so that a new limit needs no new cache. `StorageError` when it cannot be kept.
    """
    place = directory / f"prompts-{_key(rows, tokenizer)}"
    kept = _kept(place, len(rows))
    if kept is not None:
        return kept, f"tokenised prompts read from {place}"
    ids = tokenized(rows, tokenizer)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=directory) as unfinished:
            ids.save_to_disk(f"{unfinished}/ids")
            shutil.rmtree(place, ignore_errors=True)
            Path(unfinished, "ids").rename(place)
    except OSError as error:
        if _kept(place, len(rows)) is None:  # otherwise another run kept the same ids meanwhile
            raise StorageError(
                f"dataset_prepared_path: {place} cannot be written",
                why=str(error),
                do="set dataset_prepared_path to a directory with space that you may write, or "
                "skip_prepare_dataset: true",
            ) from error
    return ids, f"tokenised prompts kept in {place}"


def _kept(place: Path, num_rows: int) -> Dataset | None:
    """The ids kept in `place`, None when there are none or not all of them."""
    try:
        ids = load_from_disk(str(place))
    except (OSError, ValueError, KeyError):
        return None
    return ids if isinstance(ids, Dataset) and len(ids) == num_rows and ids.features == _FEATURES else None


def _key(rows: Dataset, tokenizer: PromptTokenizer) -> str:
    """A hash of the prompts themselves and of everything that decides their ids."""
    digest = hashlib.sha256(tokenizer.fingerprint().encode())
    for batch in rows.select_columns(["prompt"]).iter(_BATCH):
        digest.update(json.dumps(batch["prompt"], default=str).encode())
    return digest.hexdigest()[:20]
