"""Import paths in the config (`rewards.accuracy_reward`) to the objects they name; errors that explain themselves."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from axolotl.errors import AxolotlError
from axolotl.utils.user_code import error_lines, error_place, one_line, pass_interruption, user_frames


def search_directories(base_dir: Path) -> tuple[Path, ...]:
    """Where user modules and files are looked for: the working directory, then the config's directory."""
    return tuple(dict.fromkeys((Path.cwd(), base_dir.resolve())))


def import_attribute(
    path: str, *, search: Sequence[Path], key: str, error: type[AxolotlError], code: str
) -> tuple[Any, str]:
    """The object that `path` (`module.name`, `package.module.name`) names, and the file its module came from.

    The directories of `search` come first while the user's module is imported and stay at the end of `sys.path`
    afterwards, so that later imports inside user functions work and no installed package is ever hidden.

    Args:
        key: the option that holds `path`, for the message.
        error, code: what to raise: the module does not exist, fails inside its own import, or lacks the name.
    """
    wanted = _Wanted(path, tuple(search), key, error, code)
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise error(
            f"{key}: {path!r} is not an import path",
            code=code,
            do="write module.name, such as rewards.accuracy_reward for the function accuracy_reward of rewards.py",
        )
    for split in range(len(parts) - 1, 0, -1):
        module = _import_module(".".join(parts[:split]), wanted)
        if module is not None:
            return _attribute(module, parts[split:], wanted), _file_of(module)
    raise wanted.failure(
        f"there is no module {'.'.join(parts[:-1])!r}",
        why=f"looked in {', '.join(map(str, search))} and PYTHONPATH{_near_modules(parts[0], search)}",
        do=f"run from the directory that holds {parts[0]}.py, or put it beside the config",
    )


@dataclass(frozen=True)
class _Wanted:
    path: str
    search: tuple[Path, ...]
    key: str
    error: type[AxolotlError]
    code: str

    def failure(self, what: str, why: str, do: str, details: tuple[str, ...] = ()) -> AxolotlError:
        text = f"{self.key}: cannot import {self.path}: {what}"
        return self.error(text, code=self.code, why=why, do=do, details=details)


def _import_module(name: str, wanted: _Wanted) -> ModuleType | None:
    """None when there is no such module; raises when it exists and its own import fails."""
    try:
        with _importable(wanted.search):
            return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        is_itself_missing = problem.name is not None and (name == problem.name or name.startswith(f"{problem.name}."))
        if is_itself_missing and not user_frames(problem):
            return None
        why = f"it needs {problem.name!r}, which is not installed" if problem.name else one_line(problem)
        raise _failed_inside(problem, why, wanted) from problem
    except (Exception, SystemExit) as problem:
        pass_interruption(problem)
        raise _failed_inside(problem, one_line(problem), wanted) from problem


def _failed_inside(problem: BaseException, why: str, wanted: _Wanted) -> AxolotlError:
    place = error_place(problem)
    return wanted.failure(
        f"its module fails inside its own import{f' ({place})' if place else ''}",
        why=why,
        do=f"correct {place.partition(':')[0] or 'the module'}, or install what it needs",
        details=error_lines(problem),
    )


def _attribute(module: ModuleType, names: Sequence[str], wanted: _Wanted) -> Any:
    value: Any = module
    for name in names:
        if not hasattr(value, name):
            public = [other for other in dir(value) if not other.startswith("_")]
            near = difflib.get_close_matches(name, public, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(public[:10]) or 'no names'}"
            raise wanted.failure(
                f"{_file_of(module)} has no {name!r}",
                why=hint + _hidden_file(module, wanted.search),
                do=f"correct the name in {wanted.key}, or define it in {Path(_file_of(module)).name}",
            )
        value = getattr(value, name)
    return value


def _hidden_file(module: ModuleType, search: Sequence[Path]) -> str:
    """Says so when the user has a file of that name and Python already holds another module under it."""
    top = module.__name__.partition(".")[0]
    for directory in search:
        mine = directory / f"{top}.py"
        if mine.exists() and str(mine) != _file_of(sys.modules[top]):
            return f"; {mine} is hidden by that module of the same name: rename yours"
    return ""


def _near_modules(name: str, search: Sequence[Path]) -> str:
    found = {file.stem for directory in search if directory.is_dir() for file in directory.glob("*.py")}
    near = difflib.get_close_matches(name, sorted(found), n=2, cutoff=0.6)
    return f"; there is {' and '.join(f'{module}.py' for module in near)}" if near else ""


def _file_of(module: ModuleType) -> str:
    try:
        return inspect.getfile(module)
    except TypeError:
        return module.__name__


@contextmanager
def _importable(directories: Sequence[Path]) -> Iterator[None]:
    """The directories first on `sys.path` inside the block, last on it for good afterwards."""
    entries = [str(directory) for directory in directories]
    before = list(sys.path)
    sys.path[:] = entries + before
    importlib.invalidate_caches()
    try:
        yield
    finally:
        added = [entry for entry in sys.path if entry not in entries and entry not in before]
        sys.path[:] = added + before + [entry for entry in entries if entry not in before]
