"""Jinja chat templates shipped under a name, and how `chat_template` is turned into one."""

from __future__ import annotations

import difflib
from pathlib import Path

from axolotl.errors import ConfigError
from axolotl.utils.imports import search_directories

TOKENIZER_DEFAULT = "tokenizer_default"

_DIRECTORY = Path(__file__).parent


def shipped_names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in _DIRECTORY.glob("*.jinja")))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: {file} cannot be read as text", why=str(error), do="give a Jinja file in UTF-8"
        ) from error


def resolve_template(setting: str | None, base_dir: Path) -> str | None:
    """The Jinja text that `chat_template` means; None keeps the tokenizer's own.

    `setting` is `tokenizer_default` or null, a shipped name, Jinja text (recognised by its braces), or a file, looked
    for in the working directory and then beside the config. `ConfigError` otherwise.
    """
    if setting is None or setting == TOKENIZER_DEFAULT:
        return None
    if "{{" in setting or "{%" in setting:
        return setting
    if setting in shipped_names():
        return (_DIRECTORY / f"{setting}.jinja").read_text(encoding="utf-8").rstrip("\n")
    tried = [directory / Path(setting).expanduser() for directory in search_directories(base_dir)]
    for file in tried:
        if file.is_file():
            return _read(file)
    near = difflib.get_close_matches(setting, shipped_names(), n=1, cutoff=0.5)
    raise ConfigError(
        f"chat_template: {setting!r} is neither a shipped template nor a file"
        + (f". Did you mean {near[0]}?" if near else ""),
        why=f"shipped: {', '.join(shipped_names())}; looked for {', '.join(map(str, tried))}",
        do=f"use {TOKENIZER_DEFAULT}, a shipped name, a file, or the Jinja text itself",
    )
