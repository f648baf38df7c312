from __future__ import annotations

from functools import partial
from typing import Any

from axolotl.core.trainers.grpo.rewards.function import RewardFunction


def plain(completions: list[Any], answer: list[str], scale: float = 1.0) -> list[float]:
    return [scale] * len(completions)


def open_ended(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


class Judge:
    def __call__(self, prompts: list[Any], *, level: list[int]) -> list[float]:
        return [float(x) for x in level]


def of(function: Any) -> RewardFunction:
    return RewardFunction("rewards.f", "f", function, "rewards.py")


def test_required_are_the_parameters_without_a_default() -> None:
    assert of(plain).required == ("completions", "answer")
    assert of(open_ended).required == ("completions",)
    assert of(Judge()).required == ("prompts", "level")
    assert of(partial(plain, answer=["1"])).required == ("completions",)


def test_only_what_the_signature_takes_is_passed() -> None:
    arguments = {"completions": 1, "answer": 2, "level": 3}
    assert of(plain).accepted(arguments) == {"completions": 1, "answer": 2}
    assert of(open_ended).accepted(arguments) == arguments
    assert of(lambda level: level).accepted(arguments) == {"level": 3}


def test_place_is_where_it_is_defined() -> None:
    line = plain.__code__.co_firstlineno
    assert of(plain).place == f"test_function.py:{line}"
    assert of(partial(partial(plain), scale=2.0)).place == f"test_function.py:{line}"
    assert of(Judge()).place == f"test_function.py:{Judge.__call__.__code__.co_firstlineno}"
    assert of(len).place == "rewards.py"
