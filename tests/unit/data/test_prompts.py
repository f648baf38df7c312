from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from axolotl.data.prompts import PromptData, prepare_prompts, split_rows
from axolotl.errors import ConfigError, DataError
from tests.support.configs import resolved_config
from tests.support.tiny_model import make_tiny_tokenizer
from tests.support.user_modules import write_module

TRANSFORM = """
def sums(cfg, *args, **kwargs):
    def one(example, tokenizer=None):
        return {
            "prompt": [{"role": "user", "content": example["question"]}],
            "answer": example["answer"].split("####")[-1].strip(),
        }
    return one, {"remove_columns": ["question"]}
"""


def write_rows(directory: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def directory(tmp_path: Path, elsewhere: Path) -> Path:
    """The config's directory: ten questions, the sixth of 80 tokens and the others of 17, and their transform."""
    rows = [{"question": f"What is {i} + 1? " * (10 if i == 5 else 1), "answer": f"so #### {i + 1}"} for i in range(10)]
    write_rows(tmp_path, "sums.jsonl", rows)
    write_rows(tmp_path, "texts.jsonl", [{"prompt": "Think", "level": i} for i in range(4)])
    write_module(tmp_path, "prompts_mod", TRANSFORM)
    return tmp_path


SUMS = {"path": "sums.jsonl", "type": "prompts_mod.sums"}


def prepare(directory: Path, *entries: dict[str, Any], **options: Any) -> PromptData:
    config = resolved_config(datasets=list(entries) or [SUMS], **{"sequence_len": 100, **options})
    return prepare_prompts(config, make_tiny_tokenizer(), directory)


def test_a_row_has_its_prompt_its_tokens_and_the_columns_for_rewards(directory: Path) -> None:
    data = prepare(directory)
    row = data.train[3]
    assert row.index == 3 and row.columns == {"answer": "4"}
    assert row.prompt == [{"role": "user", "content": "What is 3 + 1? "}]
    assert make_tiny_tokenizer().decode(row.ids) == (
        "<|im_start|>user\nWhat is 3 + 1? <|im_end|>\n<|im_start|>assistant\n"
    )
    assert data.train.columns == ("answer",) and len(data.train) == 10 and data.evaluation is None
    assert data.notes == ("prompt limit: 100 tokens (sequence_len 100)", "10 prompts to train on")


def test_rows_are_a_sequence(directory: Path) -> None:
    train = prepare(directory).train
    assert [row.index for row in train] == list(range(10))
    assert train[-1].index == 9 and [row.index for row in train[2:6:2]] == [2, 4]
    with pytest.raises(IndexError):
        train[10]


def test_rows_may_hold_prompts_already(directory: Path) -> None:
    data = prepare(directory, {"path": "texts.jsonl"})
    assert data.train[2].prompt == "Think" and data.train[2].columns == {"level": 2}


def test_several_entries_follow_each_other(directory: Path) -> None:
    data = prepare(directory, {**SUMS, "split": "train[:2]"}, {**SUMS, "split": "train[-1:]"})
    assert [row.columns["answer"] for row in data.train] == ["1", "2", "10"]


def test_entries_with_other_columns_are_an_error_that_names_them(directory: Path) -> None:
    with pytest.raises(
        DataError, match=r"sums\.jsonl and texts\.jsonl .* only one of them has answer, level"
    ) as caught:
        prepare(directory, SUMS, {"path": "texts.jsonl"})
    assert caught.value.code == "E-DAT-02"


def test_entries_with_other_types_are_an_error(directory: Path) -> None:
    write_rows(directory, "messages.jsonl", [{"prompt": [{"role": "user", "content": "x"}], "level": 1}])
    with pytest.raises(DataError, match="cannot be put together") as caught:
        prepare(directory, {"path": "texts.jsonl"}, {"path": "messages.jsonl"})
    assert caught.value.code == "E-DAT-02"


@pytest.mark.parametrize(
    ("options", "limit", "note"),
    [
        ({"sequence_len": 40}, 40, "prompt limit: 40 tokens (sequence_len 40)"),
        (
            {"vllm": {"max_model_len": 50}, "trl": {"max_completion_length": 20}},
            30,
            "prompt limit: 30 tokens (sequence_len 100; max_model_len 50 - max_completion_length = 30)",
        ),
    ],
)
def test_long_prompts_are_dropped_with_a_count_and_the_first_row(
    directory: Path, options: dict[str, Any], limit: int, note: str
) -> None:
    data = prepare(directory, **options)
    assert data.notes == (
        note,
        f"dropped 1 of 10 prompts longer than {limit} tokens, first row 5",
        "9 prompts to train on",
    )
    assert [row.columns["answer"] for row in data.train] == ["1", "2", "3", "4", "5", "7", "8", "9", "10"]
    assert [row.index for row in data.train] == list(range(9))


def test_long_prompts_can_be_an_error_or_be_cut(directory: Path) -> None:
    with pytest.raises(DataError, match="1 of 10 prompts longer than 40 tokens, first row 5"):
        prepare(directory, sequence_len=40, long_prompts="error")
    whole = prepare(directory).train[5].ids
    cut = prepare(directory, sequence_len=40, long_prompts="truncate_left").train[5]
    assert len(whole) == 80 and cut.ids == whole[40:]
    assert cut.prompt == [{"role": "user", "content": "What is 5 + 1? " * 10}]


def test_no_prompt_left_is_an_error(directory: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepare(directory, sequence_len=5)
    assert caught.value.code == "E-DAT-04" and caught.value.exit_code == 4


def test_evaluation_rows_are_set_aside_in_order_by_seed(directory: Path) -> None:
    def answers(**options: Any) -> tuple[list[str], list[str]]:
        data = prepare(directory, **options)
        assert data.evaluation is not None
        return [r.columns["answer"] for r in data.train], [r.columns["answer"] for r in data.evaluation]

    train, evaluation = answers(val_set_size=0.2)
    assert len(evaluation) == 2 and sorted(train + evaluation, key=int) == [str(i) for i in range(1, 11)]
    assert train == sorted(train, key=int) and evaluation == sorted(evaluation, key=int)
    assert answers(val_set_size=2) == (train, evaluation)
    assert len({tuple(answers(val_set_size=3, seed=seed)[1]) for seed in range(5)}) > 1
    assert "7 prompts to train on, 3 to evaluate on" in prepare(directory, val_set_size=3).notes
    assert "1 prompt to train on, 9 to evaluate on" in prepare(directory, val_set_size=9).notes


def test_the_size_of_the_split() -> None:
    rows = Dataset.from_dict({"i": list(range(7))})

    def sizes(size: float) -> tuple[int, int]:
        train, evaluation = split_rows(rows, size, 0)
        return len(train), 0 if evaluation is None else len(evaluation)

    assert [sizes(size) for size in (0.0, 0.01, 0.5, 1.0, 6.0)] == [(7, 0), (6, 1), (3, 4), (6, 1), (1, 6)]
    for size in (0.999, 7.0):
        with pytest.raises(DataError, match=r"val_set_size: .* leaves none to train on"):
            split_rows(rows, size, 0)


def test_the_cache_is_written_unless_skipped_and_said(directory: Path, elsewhere: Path) -> None:
    prepare(directory, dataset_prepared_path="prepared", skip_prepare_dataset=True)
    assert not (elsewhere / "prepared").exists()
    first = prepare(directory, dataset_prepared_path="prepared")
    assert first.notes[0].startswith("tokenised prompts kept in prepared/")
    second = prepare(directory, dataset_prepared_path="prepared", sequence_len=40)
    assert second.notes[0].startswith("tokenised prompts read from prepared/")
    assert second.train[4].ids == first.train[4].ids and len(second.train) == 9


def test_a_transform_that_fails_on_a_row_names_it(directory: Path) -> None:
    write_module(
        directory, "failing_mod", "def t(cfg):\n    return lambda row: {'prompt': row['answer'].removeprefix(7)}\n"
    )
    with pytest.raises(DataError, match=r"failing_mod\.t raised TypeError: .* on row 0 \(failing_mod\.py:2\)"):
        prepare(directory, {"path": "sums.jsonl", "type": "failing_mod.t"})


def test_data_without_prompts_names_its_columns(directory: Path) -> None:
    with pytest.raises(
        DataError, match=r"there is no column `prompt`; the data set has \[question, answer\]"
    ) as caught:
        prepare(directory, {"path": "sums.jsonl"})
    assert caught.value.code == "E-DAT-02" and "type" in caught.value.do
    write_module(directory, "forgets_mod", "def t(cfg):\n    return lambda row: {'promt': 'x'}\n")
    with pytest.raises(DataError, match=r"after forgets_mod\.t there is no column `prompt`"):
        prepare(directory, {"path": "sums.jsonl", "type": "forgets_mod.t"})


def test_our_own_column_name_is_taken(directory: Path) -> None:
    write_rows(directory, "ours.jsonl", [{"prompt": "x", "prompt_ids": [1]}])
    with pytest.raises(DataError, match="column name prompt_ids is ours"):
        prepare(directory, {"path": "ours.jsonl"})


def test_no_data_sets_is_an_error(directory: Path) -> None:
    with pytest.raises(ConfigError, match="datasets: there are none"):
        prepare_prompts(resolved_config(), make_tiny_tokenizer(), directory)
