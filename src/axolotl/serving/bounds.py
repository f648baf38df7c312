"""The free part of a request body (`dict[str, Any]`), made safe to compare, print and pass on."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator

MAX_DEPTH = 8
MAX_SIZE = 65_536
_INT64 = 2**63


def check_plain(value: dict[str, Any]) -> dict[str, Any]:
    """Raise `ValueError` for what nests deeper than `MAX_DEPTH`, is larger than `MAX_SIZE` (characters and values
    together), or holds a number that is not finite or has more than 64 bits. Not recursive itself."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    size = 0
    while waiting:
        item, depth = waiting.pop()
        size += len(item) if isinstance(item, str) else 1
        if size > MAX_SIZE:
            raise ValueError(f"more than {MAX_SIZE} characters and values")
        if isinstance(item, dict | list) and depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{item} is not finite")
        if isinstance(item, int) and not -_INT64 <= item < _INT64:
            raise ValueError("a whole number has more than 64 bits")
        if isinstance(item, dict):
            waiting += [(key, depth) for key in item] + [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            waiting += [(inner, depth + 1) for inner in item]
    return value


PlainDict = Annotated[dict[str, Any], AfterValidator(check_plain)]
