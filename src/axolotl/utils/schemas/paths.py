"""Options that hold paths: what no file system can mean is a mistake of the config, found before anything is opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.nodes import Path as KeyPath
from axolotl.utils.schemas.nodes import Problem

# Linux's limits, in bytes, which are the widest in use.
_LONGEST_NAME = 255
_LONGEST_PATH = 4095


def paths_can_exist(config: AxolotlConfig) -> list[Problem]:
    """`~name` of nobody, a name that is too long, or a NUL."""
    return [Problem(key, problem) for key, text in _paths(config) if (problem := _problem(text))]


def _paths(config: AxolotlConfig) -> Iterator[tuple[KeyPath, str]]:
    for name in ("base_model", "tokenizer_config", "output_dir", "dataset_prepared_path", "resume_from_checkpoint"):
        if value := getattr(config, name):
            yield (name,), value
    if isinstance(config.deepspeed, str):
        yield ("deepspeed",), config.deepspeed
    if config.chat_template and "{{" not in config.chat_template and "{%" not in config.chat_template:
        yield ("chat_template",), config.chat_template
    # Without an option the directory is below the home directory, which an unknown user does not have.
    yield ("vllm", "sync_dir"), config.vllm.sync_dir or "~"
    for index, entry in enumerate(config.datasets):
        yield ("datasets", index, "path"), entry.path
        files = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files or []
        for name in files:
            yield ("datasets", index, "data_files"), name


def _problem(text: str) -> str | None:
    if "\0" in text:
        return "holds a NUL character, which no path can"
    if len(text.encode(errors="surrogateescape")) > _LONGEST_PATH or any(
        len(part.encode(errors="surrogateescape")) > _LONGEST_NAME for part in text.split("/")
    ):
        return f"is too long for a path: a name may have {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return f"{text.partition('/')[0]} has no home directory on this machine; write the path out"
    return None
