from __future__ import annotations

import pytest
from datasets import Dataset

from axolotl.data.lengths import limit_lengths
from axolotl.errors import DataError


@pytest.fixture
def rows() -> Dataset:
    return Dataset.from_dict({"prompt": ["a", "b", "c", "d"], "ids": [[1], [1, 2, 3], [1, 2], [1, 2, 3, 4]]})


def test_nothing_happens_at_the_limit(rows: Dataset) -> None:
    same, note = limit_lengths(rows, "ids", 4, "error")
    assert same["ids"][:] == rows["ids"][:] and note == ""


def test_drop_leaves_them_out_and_counts(rows: Dataset) -> None:
    short, note = limit_lengths(rows, "ids", 2, "drop")
    assert short["prompt"][:] == ["a", "c"]
    assert note == "dropped 2 of 4 prompts longer than 2 tokens, first row 1"


def test_truncate_left_keeps_the_end(rows: Dataset) -> None:
    cut, note = limit_lengths(rows, "ids", 2, "truncate_left")
    assert cut["ids"][:] == [[1], [2, 3], [1, 2], [3, 4]] and cut["prompt"][:] == ["a", "b", "c", "d"]
    assert note == "cut 2 of 4 prompts longer than 2 tokens, first row 1, to their last 2 tokens"


def test_error_says_how_many_and_which(rows: Dataset) -> None:
    with pytest.raises(DataError) as caught:
        limit_lengths(rows, "ids", 3, "error")
    assert caught.value.code == "E-DAT-04" and caught.value.exit_code == 4
    assert "1 of 4 prompts longer than 3 tokens, first row 3" in caught.value.what
    assert caught.value.why == "the longest has 4 tokens, the shortest 1"


def test_dropping_all_is_an_error(rows: Dataset) -> None:
    with pytest.raises(DataError) as caught:
        limit_lengths(rows.select([1, 3]), "ids", 2, "drop")
    assert caught.value.code == "E-DAT-04"
    assert caught.value.what == "no prompt is left: 2 of 2 prompts longer than 2 tokens, first row 0"


def test_one_prompt_is_one(rows: Dataset) -> None:
    _, note = limit_lengths(rows.select([3]), "ids", 2, "truncate_left")
    assert note.startswith("cut 1 of 1 prompt longer than 2 tokens")
