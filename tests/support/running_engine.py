"""A vLLM engine on a loop of its own, asked from the test's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.wire import Completion, Group, Sampling
from tests.support.groups import all_groups
from tests.support.loop_thread import LoopThread

if TYPE_CHECKING:
    from axolotl.serving.engines.vllm import VLLMEngine

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
#: Longer than two cache blocks of 32 tokens, so that prefix caching has something to share.
LONG_PROMPT = [3 + (index * 7) % 300 for index in range(70)]
TOKENS = [20, 300, 41, 7, 99, 350]
#: Four completions that take a while.
ENDLESS = Sampling(n=4, max_tokens=120, extra={"ignore_eos": True})


@dataclass(frozen=True)
class RunningEngine:
    """An engine, the loop it lives on, and what it was made from."""

    engine: VLLMEngine
    loop: LoopThread
    settings: EngineSettings


def generate(
    running: RunningEngine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    version: int = 0,
    **sampling: Any,
) -> list[Group]:
    options = Sampling(**{"n": len(seeds[0]), "max_tokens": 8, **sampling})
    return running.loop.run(all_groups(running.engine.generate(prompts, options, seeds, version)))


def score(
    running: RunningEngine, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0, version: int = 0
) -> list[float]:
    return running.loop.run(running.engine.score([prompt], [tokens], temperature, version))[0]


def load(running: RunningEngine, version: int, directory: Path) -> int:
    return running.loop.run(running.engine.load_adapter(version, directory))


def one(groups: list[Group]) -> Completion:
    return groups[0].completions[0]
