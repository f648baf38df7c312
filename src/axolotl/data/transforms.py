"""The user's dataset transform (`type: module.function`): found, called, applied, and explained when it fails.

A transform is `prompt_transform(cfg) -> (map_fn, kwargs)`: `map_fn` makes one prepared row of a raw one and may take
`tokenizer`; `kwargs` goes to `datasets.Dataset.map`.
"""

from __future__ import annotations

import difflib
import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from axolotl.data.view import ConfigView
from axolotl.errors import ConfigError, DataError
from axolotl.utils.imports import import_attribute
from axolotl.utils.user_code import error_lines, error_place, one_line, pass_interruption

_MAP_ARGUMENTS = frozenset(inspect.signature(Dataset.map).parameters) - {"self", "function"}


def apply_transform(
    rows: Dataset,
    path: str,
    *,
    cfg: ConfigView,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    search: Sequence[Path],
) -> Dataset:
    """`rows` as the transform at import path `path` prepares them; `index` is the entry's place in `datasets:`.

    Raises `ConfigError` when `path` cannot be imported or returns something else than a transform does, `DataError`
    when it fails on a row (E-DAT-02 for a column that is not there, E-DAT-03 otherwise).
    """
    key = f"datasets[{index}].type"
    transform, _ = import_attribute(path, search=search, key=key, error=ConfigError, code="E-CFG-01")
    map_fn, arguments = _call_transform(transform, path, cfg, index, key)
    _check_map_arguments(arguments, rows, path, key)
    fn_arguments = dict(arguments.pop("fn_kwargs", None) or {})
    if "tokenizer" in _parameters(map_fn) and "tokenizer" not in fn_arguments:
        fn_arguments["tokenizer"] = tokenizer
    guarded = _Guarded(
        map_fn,
        path,
        tuple(arguments.get("input_columns") or rows.column_names),
        passes_index=bool(arguments.pop("with_indices", False)),
        has_rank=bool(arguments.get("with_rank", False)),
        is_batched=bool(arguments.get("batched", False)),
    )
    # Nothing is kept on disk: datasets tells a changed function by its own code, not by the code it calls. A name of
    # our own for the result spares it hashing the tokenizer.
    settings = {
        "keep_in_memory": "cache_file_name" not in arguments,
        "load_from_cache_file": False,
        "new_fingerprint": secrets.token_hex(8),
        **arguments,
    }
    try:
        return rows.map(guarded, with_indices=True, fn_kwargs=fn_arguments, **settings)
    except DataError:
        raise
    except Exception as error:
        pass_interruption(error)
        raise DataError(
            f"{path}: the rows it makes cannot form a table",
            code="E-DAT-03",
            why=one_line(error)[:300],
            do="return a dict with the same keys and the same type under each key for every row",
        ) from error


def _call_transform(
    transform: Any, path: str, cfg: ConfigView, index: int, key: str
) -> tuple[Callable[..., Any], dict[str, Any]]:
    keywords = {"dataset_idx": index} if "dataset_idx" in _parameters(transform) else {}
    try:
        made = transform(cfg, **keywords)
    except (Exception, SystemExit) as error:
        pass_interruption(error)
        raise ConfigError(
            f"{key}: {path}(cfg) raised {one_line(error)} ({error_place(error) or path})",
            do="correct the transform",
            details=error_lines(error),
        ) from error
    if callable(made):
        return made, {}
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], Mapping):
        return made[0], dict(made[1])
    raise ConfigError(
        f"{key}: {path}(cfg) returned {type(made).__name__}; expected (map_fn, kwargs)",
        do='return the function that prepares one row and its Dataset.map arguments, such as {"remove_columns": [...]}',
    )


def _check_map_arguments(arguments: Mapping[str, Any], rows: Dataset, path: str, key: str) -> None:
    for name in arguments:
        if name not in _MAP_ARGUMENTS:
            near = difflib.get_close_matches(name, _MAP_ARGUMENTS, n=1, cutoff=0.6)
            raise ConfigError(
                f"{key}: {path} gives {name!r}, which is no argument of Dataset.map"
                + (f". Did you mean {near[0]}?" if near else ""),
                do="correct the kwargs that the transform returns",
            )
    for option in ("remove_columns", "input_columns"):
        named = arguments.get(option) or ()
        for column in [named] if isinstance(named, str) else named:
            if column not in rows.column_names:
                raise DataError(
                    f"{path}: {option} names {column!r}; the data set has [{', '.join(rows.column_names)}]",
                    code="E-DAT-02",
                    do=f"correct {option} in the kwargs that the transform returns",
                )


class _Guarded:
    """The user's `map_fn`, with the row's number in every error. Picklable when `map_fn` is, for `num_proc`."""

    def __init__(
        self,
        map_fn: Callable[..., Any],
        path: str,
        columns: tuple[str, ...],
        *,
        passes_index: bool,
        has_rank: bool,
        is_batched: bool,
    ) -> None:
        self._map_fn = map_fn
        self._path = path
        self._columns = columns
        self._passes_index = passes_index
        self._index_at = -2 if has_rank else -1
        self._is_batched = is_batched
        self._keys: set[str] | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        given = list(arguments)
        row = given[self._index_at]
        if not self._passes_index:
            del given[self._index_at]
        try:
            made = self._map_fn(*given, **keywords)
        except (Exception, SystemExit) as error:
            pass_interruption(error)
            raise self._failure(error, row) from error
        if made is None:
            raise DataError(
                f"{self._path} returned None for {self._where(row)}",
                code="E-DAT-03",
                do="return a dict with `prompt` and the columns that the rewards need",
            )
        if isinstance(made, Mapping) and not self._is_batched:
            self._check_keys(set(made), row)
        return made

    def _check_keys(self, keys: set[str], row: int) -> None:
        """The table has the columns of the first row: further ones would be lost without a word."""
        if self._keys is None:
            self._keys = keys
        if keys != self._keys:
            raise DataError(
                f"{self._path} returned other keys for row {row} than before it",
                code="E-DAT-03",
                why=f"[{', '.join(sorted(keys))}], earlier [{', '.join(sorted(self._keys))}]",
                do="return the same keys for every row, with None where there is no value",
            )

    def _failure(self, error: BaseException, row: Any) -> DataError:
        is_column = isinstance(error, KeyError) and error.args and error.args[0] not in self._columns
        return DataError(
            f"{self._path} raised {one_line(error)} on {self._where(row)} ({error_place(error) or self._path})",
            code="E-DAT-02" if is_column else "E-DAT-03",
            why=f"the row has [{', '.join(self._columns)}]",
            do="correct the transform, or the row",
            details=error_lines(error),
        )

    def _where(self, row: Any) -> str:
        return f"rows {row[0]} to {row[-1]}" if self._is_batched else f"row {row}"


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
