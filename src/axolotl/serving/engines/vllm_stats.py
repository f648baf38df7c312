"""Counting tokens as vLLM's engine computes them. Imports vLLM, so it is imported where an engine starts only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import PerEngineStatLoggerFactory
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


@dataclass
class TokenCounter:
    """prompt: prompt tokens computed, those found in the prefix cache left out. generated: sampled tokens. Neither
    falls; vLLM's own metrics are begun afresh with every engine of a process, and say nothing between its scrapes."""

    prompt: int = 0
    generated: int = 0


def counting(counter: TokenCounter) -> PerEngineStatLoggerFactory:
    """A stat logger that adds every step of every engine (with data parallelism there are several) to `counter`."""
    return lambda config, index: TokenCounting(config, index, counter)


class TokenCounting(StatLoggerBase):
    """vLLM calls `record` on the event loop, once a step."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int, counter: TokenCounter) -> None:
        self._counter = counter

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._counter.prompt += iteration_stats.prompt_token_stats.computed
            self._counter.generated += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
