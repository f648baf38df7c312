"""Which tokens each row has seen and written: what the penalties look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axolotl.serving.engines.options import TokenRules
from axolotl.serving.wire import Sampling


@dataclass
class TokenHistory:
    """Kept only as far as a request needs it.

    seen: `[rows, vocab]` bool, tokens of prompt and completion; None without a repetition penalty.
    counts: `[rows, vocab]` float32, how often a token is in the completion; None without its penalties.
    """

    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    @classmethod
    def of_prompts(
        cls, ids: torch.Tensor, mask: torch.Tensor, vocab_size: int, sampling: Sampling, rules: TokenRules
    ) -> TokenHistory:
        """ids, mask: `[rows, length]`, padding masked with 0."""
        history = cls()
        if sampling.repetition_penalty != 1.0:
            counts = torch.zeros(len(ids), vocab_size, dtype=mask.dtype, device=ids.device)
            history.seen = counts.scatter_add_(1, ids, mask) > 0
        if rules.frequency_penalty or rules.presence_penalty:
            history.counts = torch.zeros(len(ids), vocab_size, device=ids.device)
        return history

    def select(self, rows: torch.Tensor) -> None:
        """Keep the rows of this index, in its order."""
        self.seen = self.seen[rows] if self.seen is not None else None
        self.counts = self.counts[rows] if self.counts is not None else None

    def add(self, tokens: torch.Tensor) -> None:
        """One new token a row: `[rows]` int64."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        if self.counts is not None:
            self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=self.counts.dtype))
