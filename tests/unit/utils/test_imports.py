from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axolotl.errors import Interrupted, RewardError
from axolotl.utils.imports import import_attribute, search_directories
from tests.support.user_modules import imports_undone, write_module


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    with imports_undone():
        yield


def get(path: str, *search: Path) -> object:
    value, _ = import_attribute(path, search=search, key="trl.reward_funcs", error=RewardError, code="E-RWD-06")
    return value


def failure(path: str, *search: Path) -> RewardError:
    with pytest.raises(RewardError) as caught:
        get(path, *search)
    assert caught.value.code == "E-RWD-06"
    assert caught.value.what.startswith(f"trl.reward_funcs: cannot import {path}: ")
    return caught.value


def test_finds_functions_in_modules_packages_and_classes(tmp_path: Path) -> None:
    file = write_module(tmp_path, "plain_mod", "def score(): return 1\nclass Judge:\n    level = 7\n")
    write_module(tmp_path, "pack_mod.inner.scoring", "value = 3")
    assert get("plain_mod.score", tmp_path)() == 1  # type: ignore[operator]
    assert get("plain_mod.Judge.level", tmp_path) == 7
    assert get("pack_mod.inner.scoring.value", tmp_path) == 3
    _, origin = import_attribute("plain_mod.score", search=[tmp_path], key="k", error=RewardError, code="E-RWD-06")
    assert origin == str(file)


def test_directories_are_tried_in_order(tmp_path: Path) -> None:
    write_module(tmp_path / "a", "twice_mod", "where = 'a'")
    write_module(tmp_path / "b", "twice_mod", "where = 'b'")
    assert get("twice_mod.where", tmp_path / "a", tmp_path / "b") == "a"


def test_search_is_the_working_directory_then_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert search_directories(tmp_path / "conf") == (tmp_path, tmp_path / "conf")
    assert search_directories(Path(".")) == (tmp_path,)


def test_modules_of_the_directory_can_be_imported_later_but_hide_nothing_installed(tmp_path: Path) -> None:
    write_module(tmp_path, "helper_mod", "answer = 42")
    write_module(tmp_path, "lazy_mod", "def late():\n    from helper_mod import answer\n    return answer\n")
    before = list(sys.path)
    assert get("lazy_mod.late", tmp_path)() == 42  # type: ignore[operator]
    assert sys.path == [*before, str(tmp_path)]


def test_a_missing_module_lists_where_it_was_looked_for_and_near_names(tmp_path: Path) -> None:
    write_module(tmp_path, "rewards_here", "")
    error = failure("reward_here.f", tmp_path)
    assert "there is no module 'reward_here'" in error.what
    assert str(tmp_path) in error.why and "PYTHONPATH" in error.why and "there is rewards_here.py" in error.why


def test_a_missing_name_suggests_near_ones_and_names_the_file(tmp_path: Path) -> None:
    file = write_module(tmp_path, "named_mod", "def accuracy_reward(): ...\n")
    error = failure("named_mod.acuracy_reward", tmp_path)
    assert f"{file} has no 'acuracy_reward'" in error.what
    assert error.why == "did you mean accuracy_reward?"


def test_a_module_that_needs_something_not_installed_says_so_and_where(tmp_path: Path) -> None:
    write_module(tmp_path, "needs_mod", "import re\n\nimport not_there_at_all\n")
    error = failure("needs_mod.f", tmp_path)
    assert "its module fails inside its own import (needs_mod.py:3)" in error.what
    assert error.why == "it needs 'not_there_at_all', which is not installed"
    assert "ModuleNotFoundError: No module named 'not_there_at_all'" in error.details[-1]


def test_a_module_that_imports_a_missing_part_of_itself_is_not_called_missing(tmp_path: Path) -> None:
    write_module(tmp_path, "self_mod", "import self_mod.more\n")
    assert "self_mod.py:1" in failure("self_mod.f", tmp_path).what


@pytest.mark.parametrize(
    ("source", "why", "line"),
    [
        ("x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero", 2),
        ("def f(:\n    pass\n", "SyntaxError", 1),
        ("import sys\n\nsys.exit('no licence')\n", "SystemExit: no licence", 3),
    ],
)
def test_a_module_that_fails_inside_its_own_import_shows_its_own_lines(
    tmp_path: Path, source: str, why: str, line: int
) -> None:
    write_module(tmp_path, f"broken_{line}", source)
    error = failure(f"broken_{line}.f", tmp_path)
    assert f"(broken_{line}.py:{line})" in error.what
    assert error.why.startswith(why)
    assert any(f'broken_{line}.py", line {line}' in text for text in error.details)
    assert not any("importlib" in text or "axolotl" in text for text in error.details)


def test_a_file_hidden_by_an_imported_module_of_that_name_is_pointed_out(tmp_path: Path) -> None:
    write_module(tmp_path, "textwrap", "def reward(): ...\n")
    assert f"{tmp_path / 'textwrap.py'} is hidden" in failure("textwrap.reward", tmp_path).why


@pytest.mark.parametrize("path", ["accuracy_reward", "org/model", "rewards.", "a b.c", ""])
def test_what_is_no_import_path_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="is not an import path"):
        get(path, tmp_path)


def test_an_interruption_during_an_import_is_not_the_modules_fault(tmp_path: Path) -> None:
    source = "from axolotl.errors import Interrupted\nraise Interrupted('stop', signal_number=2)\n"
    write_module(tmp_path, "stopped_mod", source)
    with pytest.raises(Interrupted):
        get("stopped_mod.f", tmp_path)
