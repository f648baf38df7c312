"""`trl.reward_funcs` to callables, and the check of their signatures against the data set's columns."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from axolotl.core.trainers.grpo.rewards.function import RESERVED, RewardFunction
from axolotl.errors import DataError, RewardError
from axolotl.utils.imports import import_attribute, search_directories
from axolotl.utils.schemas.config import AxolotlConfig


def load_rewards(config: AxolotlConfig, base_dir: Path) -> tuple[RewardFunction, ...]:
    """The functions of `trl.reward_funcs`, in order. `RewardError` E-RWD-06 names one that cannot be imported."""
    return import_rewards(config.trl.reward_funcs or (), base_dir)


def import_rewards(paths: Sequence[str], base_dir: Path) -> tuple[RewardFunction, ...]:
    search = search_directories(base_dir)
    functions = []
    for path, name in zip(paths, distinct_names(paths), strict=True):
        function, file = import_attribute(
            path, search=search, key="trl.reward_funcs", error=RewardError, code="E-RWD-06"
        )
        if not callable(function):
            raise RewardError(
                f"trl.reward_funcs: {path} is {type(function).__name__}, which cannot be called",
                code="E-RWD-06",
                why=f"found in {file}",
                do="name a function, or an object with __call__",
            )
        functions.append(RewardFunction(path, name, function, file))
    return tuple(functions)


def reward_notes(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """One line a function for the start of a run: its metric name and the file it came from."""
    return tuple(f"reward {function.name}: {function.path} from {function.file}" for function in functions)


def distinct_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Metric names: the last part of each path, the whole path where two end alike, numbered where a path is repeated.

    `[a.score, b.score, a.form, a.form]` gives `a.score, b.score, a.form, a.form_2`.
    """
    ends = Counter(path.rpartition(".")[2] for path in paths)
    seen: Counter[str] = Counter()
    names: list[str] = []
    for path in paths:
        seen[path] += 1
        end = path.rpartition(".")[2]
        name = end if ends[end] == 1 else path
        names.append(name if seen[path] == 1 else f"{name}_{seen[path]}")
    return tuple(names)


def check_columns(functions: Sequence[RewardFunction], columns: Sequence[str]) -> None:
    """`DataError` E-DAT-02 when a function needs an argument that no column gives, or a column takes a reserved name.

    columns: those of the prepared data set, `prompt` and our own excluded.
    """
    taken = [name for name in columns if name in RESERVED]
    if taken:
        raise DataError(
            f"column {taken[0]!r} of the data set has the name of an argument that every reward function gets",
            code="E-DAT-02",
            do="rename or remove it in the dataset transform",
        )
    for function in functions:
        for name in function.required:
            if name not in columns and name not in RESERVED:
                raise DataError(
                    f"{function.path} needs column {name!r}; the data set has [{', '.join(columns)}]",
                    code="E-DAT-02",
                    why=f"{function.place} has {name!r} as a required argument{_near(name, columns)}",
                    do=f"keep {name!r} in the dataset transform (does remove_columns drop it?), or give it a default",
                )


def _near(name: str, columns: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
