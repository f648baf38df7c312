from __future__ import annotations

from typing import Any

import pytest

from axolotl.data.messages import checked_prompt, without_none
from axolotl.errors import DataError

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "prompt",
    [
        "plain text",
        [USER],
        [{"role": "system", "content": "s"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    ],
)
def test_good_prompts_pass_unchanged(prompt: Any) -> None:
    assert checked_prompt(prompt, 0) == prompt


def test_none_entries_are_dropped_at_every_depth() -> None:
    filled = [{"role": "user", "content": [{"type": "text", "text": "a", "image": None}], "name": None}]
    assert checked_prompt(filled, 0) == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert without_none({"a": {"b": None, "c": 0}, "d": ["", None]}) == {"a": {"c": 0}, "d": ["", None]}


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (None, "`prompt` is empty (null)"),
        (5, "`prompt` is int"),
        ({"role": "user"}, "`prompt` is dict"),
        ([], "`prompt` is an empty list"),
        (["hi"], "message 0 of `prompt` is str"),
        ([USER, {"content": "x"}], "message 1 of `prompt` has no role; its keys are ['content']"),
        ([{"role": 1, "content": "x"}], "message 0 of `prompt` has no role"),
        ([{"role": "user", "text": "x"}], "message 0 of `prompt` has no content; its keys are ['role', 'text']"),
        ([{"role": "user", "content": None}], "message 0 of `prompt` has no content"),
        ([{"role": "user", "content": 3}], "message 0 of `prompt` has content of type int"),
        ([{"role": "user", "content": [{"type": "image", "url": "u"}]}], "content of type 'image'; only text"),
        ([{"role": "user", "content": ["x"]}], "content of type 'str'; only text"),
    ],
)
def test_bad_prompts_name_the_row_and_what_is_wrong(prompt: Any, what: str) -> None:
    with pytest.raises(DataError) as caught:
        checked_prompt(prompt, 812)
    assert caught.value.code == "E-DAT-03"
    assert caught.value.what.startswith("row 812: ") and what in caught.value.what
