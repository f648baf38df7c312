"""The config as a dataset transform sees it: readable in every usual way, writable in none."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from pydantic import BaseModel


class ConfigView(Mapping[str, Any]):
    """`cfg.sequence_len`, `cfg["sequence_len"]`, `cfg.get("sequence_len")`, `cfg.trl.num_generations`; sections and
    mappings inside come as views too, lists as tuples."""

    __slots__ = ("_values",)

    def __init__(self, values: BaseModel | Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getitem__(self, name: str) -> Any:
        return _read_only(self._values[name])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._values:
            near = difflib.get_close_matches(name, self._values, n=1, cutoff=0.6)
            raise AttributeError(f"the config has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"the config is read-only here: cannot set {name!r}")

    def __repr__(self) -> str:
        return f"ConfigView({self._values!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigView, (self._values,)


def _read_only(value: Any) -> Any:
    if isinstance(value, (BaseModel, Mapping)):
        return ConfigView(value)
    if isinstance(value, (list, tuple)):
        return tuple(_read_only(item) for item in value)
    return value
