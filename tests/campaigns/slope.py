"""Does a number grow? The slope of Theil and Sen, which single outliers do not move."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence


def slope_per_100(points: Sequence[tuple[int, int]]) -> float:
    """Of `(when, how much)`: the median of the slopes between all pairs, times 100."""
    pairs = itertools.combinations(points, 2)
    return 100 * statistics.median((late - early) / (then - now) for (now, early), (then, late) in pairs)
