"""What a prompt may look like: text, or a list of messages `{"role": ..., "content": ...}`."""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers.grpo.types import Prompt
from axolotl.errors import DataError


def checked_prompt(value: Any, row: int) -> Prompt:
    """`value` as a prompt, without the None entries that Arrow puts where a message lacks a key.

    `DataError` E-DAT-03 names the row and what is wrong in it.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(row, f"`prompt` is {'empty (null)' if value is None else type(value).__name__}")
    if not value:
        raise _wrong(row, "`prompt` is an empty list")
    messages = [without_none(message) for message in value]
    for place, message in enumerate(messages):
        problem = _message_problem(message)
        if problem:
            raise _wrong(row, f"message {place} of `prompt` {problem}")
    return messages


def without_none(value: Any) -> Any:
    """`value` with None-valued keys dropped from every mapping in it."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def _message_problem(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {type(message).__name__}"
    if not isinstance(message.get("role"), str):
        return f"has no role; its keys are {sorted(message)}"
    content = message.get("content")
    if content is None:
        return "" if message.get("tool_calls") else f"has no content; its keys are {sorted(message)}"
    if isinstance(content, str):
        return ""
    if not isinstance(content, list):
        return f"has content of type {type(content).__name__}"
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            return f"has content of type {kind!r}; only text can be trained on"
    return ""


def _wrong(row: int, what: str) -> DataError:
    return DataError(
        f"row {row}: {what}",
        code="E-DAT-03",
        do='`prompt` must be text, or a list such as [{"role": "user", "content": "..."}]',
    )
