"""How much an engine has done so far: what tells slow from hung."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """Counts that only grow. One thread adds, any thread reads.

    processed: prompt tokens after their forward pass, sampled ones, and tensors of weights that were replaced.
    generated: the sampled tokens alone.
    """

    processed: int = 0
    generated: int = 0

    def read(self, tokens: int) -> None:
        self.processed += tokens

    def replaced_tensor(self) -> None:
        self.processed += 1

    def sampled(self, tokens: int) -> None:
        self.processed += tokens
        self.generated += tokens
