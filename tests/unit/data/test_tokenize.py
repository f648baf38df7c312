from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from axolotl.data.tokenize import IDS, PromptTokenizer, tokenized, tokenized_with_cache
from axolotl.errors import DataError, StorageError
from tests.support.tiny_model import make_tiny_tokenizer

TEXTS = Dataset.from_dict({"prompt": ["What is 1 + 2?", "number"]})
TURNS = Dataset.from_dict(
    {
        "prompt": [
            [{"role": "system", "content": "brief", "name": "me"}, {"role": "user", "content": "1?"}],
            [{"role": "user", "content": "2?"}],
        ]
    }
)


@pytest.fixture(scope="module")
def tiny() -> PreTrainedTokenizerFast:
    return make_tiny_tokenizer()


def changed(**attributes: Any) -> PreTrainedTokenizerFast:
    tokenizer = make_tiny_tokenizer()
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_messages_are_written_with_the_template_and_an_open_answer(tiny: PreTrainedTokenizerFast) -> None:
    made = tokenized(TURNS, PromptTokenizer(tiny, {}))
    assert made.column_names == [IDS]
    assert [tiny.decode(ids) for ids in made[IDS]] == [
        "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert made[IDS][1][0] == tiny.convert_tokens_to_ids("<|im_start|>")


def test_ids_are_those_of_the_tokenizers_own_call(tiny: PreTrainedTokenizerFast) -> None:
    made = tokenized(TURNS, PromptTokenizer(tiny, {}))
    for row, ids in zip(TURNS, made[IDS], strict=True):
        assert isinstance(row, dict)
        assert ids == tiny.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]


def test_text_is_left_as_it_is_with_the_tokenizers_own_start_token() -> None:
    tokenizer = make_tiny_tokenizer()
    made = tokenized(TEXTS, PromptTokenizer(tokenizer, {}))
    assert [tokenizer.decode(ids) for ids in made[IDS]] == TEXTS["prompt"][:]


def test_the_template_gets_the_configs_variables() -> None:
    tokenizer = changed(chat_template="{{ messages[0].content }}{{ ' brief' if short }}{{ add_generation_prompt }}")
    rows = TURNS.select([1])
    assert tokenizer.decode(tokenized(rows, PromptTokenizer(tokenizer, {"short": True}))[0][IDS]) == "2? briefTrue"
    made = tokenized(rows, PromptTokenizer(tokenizer, {"add_generation_prompt": False}))
    assert tokenizer.decode(made[0][IDS]) == "2?False"


def test_keys_that_arrow_filled_with_none_do_not_reach_the_template() -> None:
    tokenizer = changed(chat_template="{% for m in messages %}{{ m.keys() | sort | join(',') }};{% endfor %}")
    made = tokenized(TURNS, PromptTokenizer(tokenizer, {}))
    assert [tokenizer.decode(ids) for ids in made[IDS]] == ["content,name,role;content,role;", "content,role;"]


def test_messages_without_a_template_name_the_option() -> None:
    with pytest.raises(DataError, match="no chat template") as caught:
        tokenized(TURNS, PromptTokenizer(changed(chat_template=None), {}))
    assert "set chat_template" in caught.value.do


def test_a_template_that_refuses_names_the_row() -> None:
    template = "{% if messages[0].role == 'system' %}x{% else %}{{ raise_exception('needs a system turn') }}{% endif %}"
    with pytest.raises(DataError, match="row 1: the chat template cannot write `prompt`: needs a system turn"):
        tokenized(TURNS, PromptTokenizer(changed(chat_template=template), {}))


@pytest.mark.parametrize(
    ("prompts", "what"),
    [
        (["a", None], r"row 1: `prompt` is empty \(null\)"),
        (["a", "b", ""], "row 2: `prompt` is empty: it has no tokens"),
    ],
)
def test_rows_that_are_no_prompts_are_named(tiny: PreTrainedTokenizerFast, prompts: list[Any], what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        tokenized(Dataset.from_dict({"prompt": prompts}), PromptTokenizer(tiny, {}))
    assert caught.value.code == "E-DAT-03"


def test_text_and_messages_cannot_be_mixed(tiny: PreTrainedTokenizerFast) -> None:
    mixed = Dataset.from_dict({"i": [0, 1]}).map(
        lambda row: {"prompt": "text" if row["i"] == 0 else [{"role": "user", "content": "c"}]}
    )
    with pytest.raises(DataError, match="row 1: `prompt` is a list of messages, unlike that of row 0"):
        tokenized(mixed, PromptTokenizer(tiny, {}))


def test_the_cache_is_used_for_the_same_prompts_only(tiny: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    encode = PromptTokenizer(tiny, {})
    fresh, note = tokenized_with_cache(TEXTS, encode, tmp_path / "prepared")
    assert note.startswith(f"tokenised prompts kept in {tmp_path}")
    again, note = tokenized_with_cache(TEXTS, encode, tmp_path / "prepared")
    assert note.startswith(f"tokenised prompts read from {tmp_path}")
    assert again.to_dict() == fresh.to_dict()
    other, note = tokenized_with_cache(TEXTS.select([1, 0]), encode, tmp_path / "prepared")
    assert "kept in" in note and other[IDS][:] == fresh[IDS][::-1]


def test_whatever_could_change_the_ids_changes_the_fingerprint(tiny: PreTrainedTokenizerFast) -> None:
    grown = make_tiny_tokenizer()
    grown.add_tokens(["brief"])
    variants = [
        PromptTokenizer(tiny, {}),
        PromptTokenizer(tiny, {"enable_thinking": False}),
        PromptTokenizer(changed(chat_template="{{ messages }}"), {}),
        PromptTokenizer(changed(eos_token="<|im_start|>"), {}),
        PromptTokenizer(grown, {}),
    ]
    assert len({variant.fingerprint() for variant in variants}) == len(variants)
    assert PromptTokenizer(make_tiny_tokenizer(), {}).fingerprint() == variants[0].fingerprint()


def test_a_damaged_cache_is_made_again(tiny: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    encode = PromptTokenizer(tiny, {})
    fresh, _ = tokenized_with_cache(TEXTS, encode, tmp_path)
    (table,) = tmp_path.glob("prompts-*/*.arrow")
    table.write_bytes(table.read_bytes()[:50])
    again, note = tokenized_with_cache(TEXTS, encode, tmp_path)
    assert "kept in" in note and again.to_dict() == fresh.to_dict()
    assert "read from" in tokenized_with_cache(TEXTS, encode, tmp_path)[1]
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["prompts"]


def test_a_cache_that_cannot_be_written_is_an_error(tiny: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="dataset_prepared_path"):
        tokenized_with_cache(TEXTS, PromptTokenizer(tiny, {}), tmp_path / "file")
