"""An engine that does all it is told, but for one lie."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axolotl.serving.engines.protocol import Engine
from axolotl.serving.wire import CANARY_VERSION, Group, Sampling

Answers = Callable[[int], int]


def with_the_right_one(version: int) -> int:
    return version


def with_the_base_model(version: int) -> int:
    return 0


def with_the_base_model_after_the_canary(version: int) -> int:
    return version if version == CANARY_VERSION else 0


def with_the_one_before(version: int) -> int:
    """From the third version on, so that the one before is neither the base model nor gone."""
    return version - 1 if 3 <= version < CANARY_VERSION else version


@dataclass(frozen=True)
class Lie:
    """scores, samples: the version that a request for another is answered with. loads: the directory that full weights
    are really read from."""

    scores: Answers = with_the_right_one
    samples: Answers = with_the_right_one
    loads: Callable[[int, Path], Path] = lambda version, directory: directory

    @classmethod
    def about(cls, answers: Answers) -> Lie:
        return cls(scores=answers, samples=answers)


#: All that the canary's proof asks for is right, and every score afterwards; only completions are the base model's.
SAMPLES_WITH_THE_BASE_MODEL_AFTER_THE_CANARY = Lie(samples=with_the_base_model_after_the_canary)

HONEST = Lie()


class LyingEngine:
    """`Engine` over another one."""

    def __init__(self, engine: Engine, lie: Lie) -> None:
        self._engine = engine
        self._lie = lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        adapter_version: int,
    ) -> AsyncIterator[Group]:
        return self._engine.generate(prompts, sampling, seeds, self._lie.samples(adapter_version))

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        temperature: float,
        adapter_version: int,
    ) -> list[list[float]]:
        return await self._engine.score(prompts, tokens, temperature, self._lie.scores(adapter_version))

    async def load_weights(self, version: int, directory: Path) -> int:
        return await self._engine.load_weights(version, self._lie.loads(version, directory))
