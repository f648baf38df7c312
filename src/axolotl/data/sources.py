"""One entry of `datasets:` to its rows, from a local file or directory or from the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict
from huggingface_hub import constants

from axolotl.errors import DataError
from axolotl.utils.hub import hub_problem, looks_like_path
from axolotl.utils.schemas.datasets import DatasetConfig
from axolotl.utils.user_code import pass_interruption

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def load_rows(entry: DatasetConfig, search: Sequence[Path], key: str) -> Dataset:
    """The rows of `entry`, at least one.

    Args:
        search: directories in which a relative path is tried, in order.
        key: `datasets[0]`, for messages.

    Raises `DataError`: E-DAT-05 when nothing is found, E-DAT-01 when it cannot be read, E-DAT-04 when it is empty.
    """
    rows = _load(entry, search, key)
    if not len(rows):
        raise _empty(entry, key)
    return rows


def _load(entry: DatasetConfig, search: Sequence[Path], key: str) -> Dataset:
    if entry.path in set(_BUILDERS.values()) and entry.data_files:
        return _load_files(entry.path, _find_files(entry, search, key), entry, key)
    tried = [directory / Path(entry.path).expanduser() for directory in search]
    found = next((path for path in tried if path.exists()), None)
    if found is None:
        return _load_from_hub(entry, tried, key)
    if found.is_file():
        return _load_files(_builder(entry, found, key), [str(found)], entry, key)
    if (found / "state.json").exists() or (found / "dataset_dict.json").exists():
        return _load_saved(found, entry, key)
    if entry.data_files:
        files = _find_files(entry, (found,), key)
        return _load_files(_builder(entry, Path(files[0]), key), files, entry, key)
    return _load_directory(found, entry, key)


def _load_directory(directory: Path, entry: DatasetConfig, key: str) -> Dataset:
    """`name` means a configuration of the directory's data card, else a directory inside; a directory with neither has
    one configuration, whatever the name, so that a config written for the hub works with a local copy."""
    has_card = (directory / "README.md").exists()
    if entry.name and not has_card and (directory / entry.name).is_dir():
        directory = directory / entry.name
    return _load_dataset(entry, key, str(directory), name=entry.name if has_card else None)


def _load_files(builder: str, files: list[str], entry: DatasetConfig, key: str) -> Dataset:
    """Files have no splits of their own: they are the split that is asked for."""
    splits = {part.partition("[")[0].strip() for part in (entry.split or "train").split("+")}
    if len(splits) > 1:
        raise DataError(
            f"{key}.split: {entry.split!r} names several splits, and {entry.path} is a file, which is one",
            do="name one split, such as train[:1000], or use several entries under `datasets:`",
        )
    options: dict[str, Any] = {"sep": "\t"} if ".tsv" in Path(files[0]).suffixes else {}
    return _load_dataset(entry, key, builder, data_files={splits.pop(): files}, **options)


def _find_files(entry: DatasetConfig, search: Sequence[Path], key: str) -> list[str]:
    names = [entry.data_files] if isinstance(entry.data_files, str) else list(entry.data_files or ())
    return [name if "://" in name else _find_file(name, search, key) for name in names]


def _find_file(name: str, search: Sequence[Path], key: str) -> str:
    tried = [directory / Path(name).expanduser() for directory in search]
    for path in tried:
        if path.exists() or any(path.parent.glob(path.name)):
            return str(path)
    raise _missing(f"{key}.data_files: there is no file {name}", tried)


def _builder(entry: DatasetConfig, file: Path, key: str) -> str:
    if entry.ds_type:
        return entry.ds_type
    suffixes = [suffix for suffix in file.suffixes if suffix not in _COMPRESSED]
    builder = _BUILDERS.get(suffixes[-1]) if suffixes else None
    if builder is None:
        raise DataError(
            f"{key}.path: the format of {file} is not known from its name",
            do=f"set ds_type to json, csv, parquet or arrow, or rename it to one of {', '.join(_BUILDERS)}",
        )
    return builder


def _load_saved(directory: Path, entry: DatasetConfig, key: str) -> Dataset:
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    try:
        saved = datasets.load_from_disk(str(directory))
    except Exception as error:
        pass_interruption(error)
        raise _unreadable(entry, key, error) from error
    name, bracket, slice_ = (entry.split or "train").partition("[")
    if isinstance(saved, DatasetDict):
        if name not in saved:
            raise DataError(
                f"{key}.split: {entry.path} has no split {name!r}; it has {', '.join(map(str, saved))}",
                do=f"set {key}.split to one of them",
            )
        saved = saved[name]
    if not bracket:
        return saved
    try:
        instruction = datasets.ReadInstruction.from_spec(f"{name}{bracket}{slice_}")
        (absolute,) = instruction.to_absolute({name: len(saved)})
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{key}.split: {entry.split!r} is no slice of {entry.path}, which has {len(saved)} rows",
            why=_innermost(error),
            do="write a split, or a slice such as train[:1000] or train[:10%]",
        ) from error
    return saved.select(range(len(saved))[absolute.from_ : absolute.to])


def _load_from_hub(entry: DatasetConfig, tried: Sequence[Path], key: str) -> Dataset:
    is_file = Path(entry.path).suffix in _BUILDERS
    if is_file or looks_like_path(entry.path):
        raise _missing(f"{key}.path: there is no file or directory {entry.path}", tried)
    problem = hub_problem()
    if problem is not None and not _is_cached(entry.path):
        raise DataError(
            f"{key}.path: {entry.path} is neither on this machine nor can the hub be asked for it",
            code="E-DAT-05",
            why=f"{problem}; no local {' or '.join(map(str, tried))}; not in {datasets.config.HF_DATASETS_CACHE}",
            do=f"set {key}.path to a local file, or load it once where there is a network (cache: HF_HOME)",
        )
    return _load_dataset(entry, key, entry.path, name=entry.name, revision=entry.revision, data_files=entry.data_files)


def _is_cached(name: str) -> bool:
    prepared = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return prepared.exists() or downloaded.exists()


def _load_dataset(entry: DatasetConfig, key: str, source: str, **arguments: Any) -> Dataset:
    try:
        rows = datasets.load_dataset(source, split=entry.split or "train", **arguments)
    except ConnectionError as error:
        raise DataError(
            f"{key}.path: the hub could not be asked for {entry.path}",
            code="E-DAT-05",
            why=_innermost(error),
            do=f"set {key}.path to a local file, or try again where there is a network",
        ) from error
    except Exception as error:
        pass_interruption(error)
        if isinstance(_cause(error), StopIteration) or "corresponds to no data" in str(error):
            raise _empty(entry, key) from error
        raise _unreadable(entry, key, error) from error
    assert isinstance(rows, Dataset), type(rows)
    return rows


def _empty(entry: DatasetConfig, key: str) -> DataError:
    return DataError(
        f"{key}: {entry.path} holds no rows{f' in split {entry.split}' if entry.split else ''}",
        code="E-DAT-04",
        do=f"check the file and {key}.split",
    )


def _unreadable(entry: DatasetConfig, key: str, error: Exception) -> DataError:
    return DataError(
        f"{key}: {entry.path} cannot be read",
        why=_innermost(error),
        do=f"correct the file, or {key}.path, .name, .split and .ds_type",
    )


def _missing(what: str, tried: Sequence[Path]) -> DataError:
    return DataError(
        what,
        code="E-DAT-05",
        why=f"looked for {', '.join(map(str, tried))}",
        do="correct the path; relative ones start from the working directory or from the config's directory",
    )


def _innermost(error: BaseException) -> str:
    cause = _cause(error)
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text[:300]}"


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
