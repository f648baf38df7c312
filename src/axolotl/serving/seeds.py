"""Seeds for a request that brought none."""

from __future__ import annotations

import secrets


def fresh_seeds(num_prompts: int, n: int) -> list[list[int]]:
    """`[num_prompts][n]` random seeds; consecutive within a prompt, as some engines count them."""
    starts = [secrets.randbelow(2**62) for _ in range(num_prompts)]
    return [[start + index for index in range(n)] for start in starts]
