from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from axolotl.data.transforms import apply_transform
from axolotl.data.view import ConfigView
from axolotl.errors import ConfigError, DataError, Interrupted
from tests.support.tiny_model import make_tiny_tokenizer
from tests.support.user_modules import write_module

ROWS = Dataset.from_dict({"question": ["1+1", "2+2", "3+3"], "answer": ["2", "4", "6"]})
CFG = ConfigView({"trl": {"num_generations": 4}, "sequence_len": 32})

GUIDE = """
def prompt_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        return {
            "prompt": [{"role": "user", "content": example["question"]}],
            "answer": example["answer"] + " of " + str(cfg.trl.num_generations),
            "has_tokenizer": tokenizer is not None,
        }
    return transform_fn, {"remove_columns": ["question"]}
"""


def apply(tmp_path: Path, module: str, source: str, rows: Dataset = ROWS) -> Dataset:
    """`source` as a module of the user, whose `t` is the transform."""
    write_module(tmp_path, module, source)
    tokenizer = make_tiny_tokenizer()
    return apply_transform(rows, f"{module}.t", cfg=CFG, index=0, tokenizer=tokenizer, search=[tmp_path])


def test_the_guides_transform(tmp_path: Path) -> None:
    made = apply(tmp_path, "guide_t", GUIDE + "\nt = prompt_transform\n")
    assert sorted(made.column_names) == ["answer", "has_tokenizer", "prompt"]
    assert made[1] == {
        "prompt": [{"role": "user", "content": "2+2"}],
        "answer": "4 of 4",
        "has_tokenizer": True,
    }


def test_map_arguments_do_what_they_do_in_datasets(tmp_path: Path) -> None:
    source = """
    def t(cfg):
        def join(questions, numbers, mark):
            return {"prompt": [f"{n}{mark} {q}" for q, n in zip(questions, numbers)]}
        return join, {"batched": True, "batch_size": 2, "with_indices": True, "input_columns": "question",
                      "fn_kwargs": {"mark": ")"}, "remove_columns": ["question", "answer"]}
    """
    assert apply(tmp_path, "batched_t", source)["prompt"][:] == ["0) 1+1", "1) 2+2", "2) 3+3"]


def test_a_function_alone_and_a_rank_and_worker_processes_work(tmp_path: Path) -> None:
    assert apply(tmp_path, "alone_t", "def t(cfg):\n    return lambda row: {'prompt': row['question']}\n")[0] == {
        "question": "1+1",
        "answer": "2",
        "prompt": "1+1",
    }
    source = """
    def t(cfg):
        def f(row, rank):
            if row["answer"] == "6":
                raise ValueError("six")
            return {"prompt": row["question"]}
        return f, {"with_rank": True, "num_proc": 2}
    """
    with pytest.raises(DataError, match=r"procs_t\.t raised ValueError: six on row 2 \(procs_t\.py:4\)"):
        apply(tmp_path, "procs_t", source)


def test_a_changed_helper_is_never_answered_from_a_cache(tmp_path: Path) -> None:
    ROWS.to_json(tmp_path / "rows.jsonl")
    rows = Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert isinstance(rows, Dataset)
    before = sorted((tmp_path / "cache").rglob("*"))
    helper = "def helper(): return {mark!r}\ndef t(cfg):\n    return lambda row: {{'prompt': helper()}}\n"
    assert apply(tmp_path, "first_t", helper.format(mark="old"), rows)["prompt"][0] == "old"
    assert apply(tmp_path, "second_t", helper.format(mark="new"), rows)["prompt"][0] == "new"
    assert sorted((tmp_path / "cache").rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "body", "code", "what", "why"),
    [
        (
            "raises",
            "1 / (row['answer'] != '4')",
            "E-DAT-03",
            "ZeroDivisionError: division by zero on row 1",
            "question",
        ),
        ("missing", "row['questoin']", "E-DAT-02", "KeyError: 'questoin' on row 0", "[question, answer]"),
        ("inner", "{}['deep']", "E-DAT-02", "KeyError: 'deep' on row 0", "[question, answer]"),
        ("known", "{}['answer']", "E-DAT-03", "KeyError: 'answer' on row 0", "[question, answer]"),
    ],
)
def test_a_failing_row_is_named_with_its_keys_and_the_users_line(
    tmp_path: Path, name: str, body: str, code: str, what: str, why: str
) -> None:
    source = f"def t(cfg):\n    def f(row):\n        return {{'prompt': {body}}}\n    return f, {{}}\n"
    with pytest.raises(DataError) as caught:
        apply(tmp_path, f"{name}_t", source)
    assert caught.value.code == code and caught.value.exit_code == 4
    assert what in caught.value.what and f"({name}_t.py:3)" in caught.value.what
    assert why in caught.value.why
    assert any(f'{name}_t.py", line 3' in line for line in caught.value.details)
    assert not any("arrow_dataset" in line for line in caught.value.details)


def test_rows_of_a_batch_are_named_together(tmp_path: Path) -> None:
    source = "def t(cfg):\n    return (lambda rows: rows['x']), {'batched': True, 'batch_size': 2}\n"
    with pytest.raises(DataError, match="on rows 0 to 1"):
        apply(tmp_path, "batch_error_t", source)


@pytest.mark.parametrize(
    ("name", "source", "kind", "what"),
    [
        ("none", "def t(cfg):\n    return (lambda row: None), {}", DataError, "returned None for row 0"),
        ("text", "def t(cfg):\n    return (lambda row: 'x'), {}", DataError, "cannot form a table"),
        (
            "keys",
            "def t(cfg):\n    return (lambda row: {'prompt': 'x', **({} if row['answer'] == '2' else row)}), {}",
            DataError,
            "returned other keys for row 1 than before it",
        ),
        (
            "removes",
            "def t(cfg):\n    return (lambda row: row), {'remove_columns': ['questions']}",
            DataError,
            "remove_columns names 'questions'; the data set has [question, answer]",
        ),
        (
            "argument",
            "def t(cfg):\n    return (lambda row: row), {'remove_column': ['question']}",
            ConfigError,
            "gives 'remove_column', which is no argument of Dataset.map. Did you mean remove_columns?",
        ),
        ("nothing", "def t(cfg):\n    pass", ConfigError, "(cfg) returned NoneType; expected (map_fn, kwargs)"),
        ("key", "def t(cfg):\n    cfg.no_option", ConfigError, "raised AttributeError: the config has no 'no_option'"),
    ],
)
def test_a_transform_that_is_not_one(tmp_path: Path, name: str, source: str, kind: type[Exception], what: str) -> None:
    with pytest.raises(kind) as caught:
        apply(tmp_path, f"{name}_wrong_t", source)
    error: Any = caught.value
    assert what in error.what and error.do


def test_a_transform_that_cannot_be_imported_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"datasets\[0\]\.type: cannot import broken_t\.t: its module fails inside"):
        apply(tmp_path, "broken_t", "import no_such_package_here\n")
    with pytest.raises(ConfigError, match=r"datasets\[0\]\.type: 'alpaca' is not an import path"):
        apply_transform(ROWS, "alpaca", cfg=CFG, index=0, tokenizer=make_tiny_tokenizer(), search=[tmp_path])


@pytest.mark.parametrize(
    ("name", "body"),
    [("calling", "raise stop"), ("mapping", "def f(row):\n        raise stop\n    return f")],
)
def test_an_interruption_is_not_the_transforms_fault(tmp_path: Path, name: str, body: str) -> None:
    source = f"""from axolotl.errors import Interrupted
stop = Interrupted("stop", signal_number=15)
def t(cfg):
    {body}
"""
    with pytest.raises(Interrupted) as caught:
        apply(tmp_path, f"stopped_{name}_t", source)
    assert caught.value.exit_code == 143
