"""The quickstart's reward and its prompts. Nothing here knows about training: a reward is a function of texts."""

from __future__ import annotations

import re
from typing import Any

SYSTEM = "Answer with the number only."


def chat(question: str) -> list[dict[str, str]]:
    """The messages that the model sees."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def is_right(text: str, answer: str) -> bool:
    """Whether the last number in the text is the answer."""
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and numbers[-1] == answer


def right_answer(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
    """The reward: 1 for a right completion, 0 for a wrong one. `answer` is the data set's column of that name."""
    return [
        1.0 if is_right(completion[0]["content"], correct) else 0.0
        for completion, correct in zip(completions, answer, strict=True)
    ]


def to_prompt(cfg: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The data set transform: each row's question becomes its `prompt`; `answer` stays for the reward."""

    def transform(example: dict[str, str], tokenizer: Any = None) -> dict[str, Any]:
        return {"prompt": chat(example["question"]), "answer": example["answer"]}

    return transform, {"remove_columns": ["question"]}
