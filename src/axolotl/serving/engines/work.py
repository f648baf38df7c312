"""How much an engine has done so far: what tells slow from hung."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """Counts of tokens that only grow. One thread adds, any thread reads.

    processed: prompt tokens after their forward pass, and sampled ones. generated: the sampled ones alone.
    """

    processed: int = 0
    generated: int = 0

    def read(self, tokens: int) -> None:
        self.processed += tokens

    def sampled(self, tokens: int) -> None:
        self.processed += tokens
        self.generated += tokens
