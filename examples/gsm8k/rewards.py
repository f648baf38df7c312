"""Rewards and prompts for grade-school mathematics (the GSM8K data set)."""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SYSTEM = (
    "Think the problem through between <think> and </think>, "
    "then give only the final number between <answer> and </answer>."
)


def accuracy_reward(completions, answer, **kwargs) -> list[float]:
    """1 where the last number of the completion is the answer. `answer` is a column of the data set."""
    scores = []
    for completion, correct in zip(completions, answer, strict=True):
        numbers = NUMBER.findall(completion[0]["content"].replace(",", ""))
        scores.append(1.0 if numbers and float(numbers[-1]) == float(correct) else 0.0)
    return scores


def format_reward(completions, **kwargs) -> list[float]:
    """1 where the completion has a part for thinking, then one for the answer."""
    pattern = re.compile(r"<think>.+?</think>.*?<answer>.+?</answer>", re.DOTALL)
    return [1.0 if pattern.search(completion[0]["content"]) else 0.0 for completion in completions]


def prompt_transform(cfg, *args, **kwargs):
    """A row of GSM8K (`question`, `answer` ending in `#### 42`) becomes a chat prompt and the bare number."""

    def transform(example, tokenizer=None):
        return {
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": example["question"]},
            ],
            "answer": example["answer"].rsplit("####", 1)[-1].strip().replace(",", ""),
        }

    return transform, {"remove_columns": ["question"]}
