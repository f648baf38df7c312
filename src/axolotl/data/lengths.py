"""What happens to prompts over the limit (`long_prompts`)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from datasets import Dataset

from axolotl.errors import DataError

Policy = Literal["drop", "error", "truncate_left"]


def limit_lengths(rows: Dataset, column: str, limit: int, policy: Policy) -> tuple[Dataset, str]:
    """`rows` without a prompt of more than `limit` tokens, and a line that says what was done, "" when nothing was.

    `column` holds the token ids. `drop` leaves long prompts out, `truncate_left` keeps their last `limit` tokens,
    `error` raises `DataError` E-DAT-04, as does dropping all of them.
    """
    batches = rows.select_columns([column]).iter(1000)
    lengths = np.fromiter((len(ids) for batch in batches for ids in batch[column]), dtype=np.int64, count=len(rows))
    too_long = np.flatnonzero(lengths > limit)
    if not len(too_long):
        return rows, ""
    what = f"{len(too_long)} of {num_prompts(len(rows))} longer than {limit} tokens, first row {too_long[0]}"
    if policy == "truncate_left":
        return _truncated(rows, column, limit), f"cut {what}, to their last {limit} tokens"
    if policy == "drop" and len(too_long) < len(rows):
        return rows.select(np.flatnonzero(lengths <= limit)), f"dropped {what}"
    raise DataError(
        f"long_prompts: error, and the data set has {what}" if policy == "error" else f"no prompt is left: {what}",
        code="E-DAT-04",
        why=f"the longest has {lengths.max()} tokens, the shortest {lengths.min()}",
        do="raise sequence_len (and vllm.max_model_len), lower trl.max_completion_length, or set long_prompts: "
        + ("drop or truncate_left" if policy == "error" else "truncate_left"),
    )


def num_prompts(count: int) -> str:
    """The count with its noun."""
    return f"{count} prompt{'' if count == 1 else 's'}"


def _truncated(rows: Dataset, column: str, limit: int) -> Dataset:
    features = rows.features
    return rows.map(
        lambda batch: {column: [ids[-limit:] for ids in batch]},
        input_columns=[column],
        batched=True,
        features=features,
        keep_in_memory=True,
        load_from_cache_file=False,
    )
