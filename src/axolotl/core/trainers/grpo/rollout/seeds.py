"""The seed of a completion: a function of what it is, not of when or where it is made.

A retry, a restart, another number of ranks or another batch gives the same completion the same seed.
"""

from __future__ import annotations

import hashlib

# Fits a float64 exactly, so that no JSON reader on the way can round it.
_SEED_BITS = 48


def completion_seed(run_seed: int, epoch: int, prompt: int, index: int, reroll: int = 0) -> int:
    """A 48-bit seed for completion `index` of row `prompt` in `epoch`; `reroll` counts how often it was drawn again."""
    key = f"{run_seed}/{epoch}/{prompt}/{index}/{reroll}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)
