"""Which keys there are, and which one a misspelt key was meant to be."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.nodes import Path, dotted


def sections() -> dict[Path, type[BaseModel]]:
    """Every mapping of the config and the model that describes it; `*` stands for a list index."""
    return dict(_walk((), AxolotlConfig))


def option_names() -> set[str]:
    """The names of all options, sections left out."""
    return {name for model in sections().values() for name in model.model_fields} - {"trl", "vllm", "datasets"}


def _walk(path: Path, model: type[BaseModel]) -> Iterator[tuple[Path, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _walk((*path, name), annotation)
        elif typing.get_origin(annotation) is list:
            (item,) = typing.get_args(annotation)
            if isinstance(item, type) and issubclass(item, BaseModel):
                yield from _walk((*path, name, "*"), item)


def unknown_key(path: Path, *, extra: Sequence[str] = ()) -> str:
    """What to say about a key that does not exist.

    Args:
        path: where it was written.
        extra: further words that would have been right at the top level (command line flags).
    """
    *parents, key = path
    section = tuple("*" if isinstance(part, int) else part for part in parents)
    known = sections()
    key = str(key)
    here = [*known[section].model_fields, *(extra if not section else ())] if section in known else []
    elsewhere = {other: model for other, model in known.items() if other != section}
    for other, model in elsewhere.items():
        if key in model.model_fields:
            return f"unknown key; it belongs {_place(other)}"
    if close := difflib.get_close_matches(key, here, n=1, cutoff=0.7):
        return f"unknown key. Did you mean {close[0]}?"
    for other, model in elsewhere.items():
        if close := difflib.get_close_matches(key, list(model.model_fields), n=1, cutoff=0.8):
            return f"unknown key. Did you mean {dotted((*other, close[0]))}?"
    return "unknown key"


def _place(section: Path) -> str:
    return f"under {dotted(part for part in section if part != '*')}:" if section else "at the top level"
