from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from axolotl.core.trainers.grpo.rewards.function import RewardFunction
from axolotl.core.trainers.grpo.rewards.loading import (
    check_columns,
    distinct_names,
    load_rewards,
    reward_notes,
)
from axolotl.errors import DataError, RewardError
from axolotl.utils.schemas.config import AxolotlConfig
from tests.support.user_modules import imports_undone, write_module

SOURCE = """
from functools import partial

def accuracy(completions, answer, **kwargs):
    return [1.0] * len(completions)

def scaled(completions, scale, **kwargs):
    return [scale] * len(completions)

class Judge:
    def __call__(self, completions):
        return [3.0] * len(completions)

judge = Judge()
half = partial(scaled, scale=0.5)
short = lambda completions: [float(len(c)) for c in completions]

async def remote(completions, **kwargs):
    return [4.0] * len(completions)

number = 5
"""


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    with imports_undone():
        yield


def config(*paths: str) -> AxolotlConfig:
    return AxolotlConfig(base_model="m", rl="grpo", datasets=[], trl={"reward_funcs": list(paths)})


def test_functions_partials_objects_lambdas_and_async_functions_load(tmp_path: Path) -> None:
    file = write_module(tmp_path, "kinds_mod", SOURCE)
    names = ("accuracy", "half", "judge", "short", "remote")
    functions = load_rewards(config(*(f"kinds_mod.{name}" for name in names)), tmp_path)
    assert tuple(function.name for function in functions) == names
    assert {function.file for function in functions} == {str(file)}
    assert functions[1].function(completions=["a"]) == [0.5]
    assert functions[2].function(completions=["a"]) == [3.0]
    assert reward_notes(functions)[0] == f"reward accuracy: kinds_mod.accuracy from {file}"


def test_no_rewards_are_no_functions(tmp_path: Path) -> None:
    assert load_rewards(config(), tmp_path) == ()


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.score", "b.form"], ("score", "form")),
        (["a.score", "b.score", "b.form"], ("a.score", "b.score", "form")),
        (["a.score", "a.score"], ("a.score", "a.score_2")),
        (["a.score", "b.score", "a.score", "a.score"], ("a.score", "b.score", "a.score_2", "a.score_3")),
    ],
)
def test_names_are_the_last_part_and_distinct(paths: list[str], names: tuple[str, ...]) -> None:
    assert distinct_names(paths) == names


def test_a_module_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RewardError) as caught:
        load_rewards(config("no_such_rewards.accuracy"), tmp_path)
    assert caught.value.code == "E-RWD-06" and caught.value.exit_code == 5
    assert "no module 'no_such_rewards'" in caught.value.what and str(tmp_path) in caught.value.why


def test_a_module_that_fails_inside_its_own_import(tmp_path: Path) -> None:
    write_module(tmp_path, "failing_rewards", "import re\nimport math_verify_that_is_missing\n")
    with pytest.raises(RewardError) as caught:
        load_rewards(config("failing_rewards.accuracy"), tmp_path)
    assert caught.value.code == "E-RWD-06"
    assert "failing_rewards.py:2" in caught.value.what
    assert "'math_verify_that_is_missing', which is not installed" in caught.value.why


def test_something_that_cannot_be_called(tmp_path: Path) -> None:
    write_module(tmp_path, "number_mod", SOURCE)
    with pytest.raises(RewardError, match=r"number_mod\.number is int, which cannot be called"):
        load_rewards(config("number_mod.number"), tmp_path)


def of(function: object) -> RewardFunction:
    return RewardFunction("rewards.accuracy", "accuracy", function, "rewards.py")  # type: ignore[arg-type]


def test_columns_that_a_signature_needs_must_exist() -> None:
    def accuracy(completions: object, answer: object, prompts: object, trainer_state: object) -> None: ...

    check_columns([of(accuracy)], ["answer", "level"])
    with pytest.raises(DataError) as caught:
        check_columns([of(accuracy)], ["answers", "level"])
    assert caught.value.code == "E-DAT-02" and caught.value.exit_code == 4
    assert caught.value.what == "rewards.accuracy needs column 'answer'; the data set has [answers, level]"
    assert "did you mean 'answers'?" in caught.value.why and "test_loading.py:" in caught.value.why
    assert "remove_columns" in caught.value.do


def test_a_default_or_open_keywords_need_no_column() -> None:
    check_columns([of(lambda completions, answer=None, **kwargs: None)], [])


def test_a_column_may_not_take_the_name_of_an_argument() -> None:
    with pytest.raises(DataError, match="column 'completions'"):
        check_columns([], ["answer", "completions"])
