"""One run on as many ranks as there are: the same prompts a step, each rank with its share of them.

torchrun --nproc-per-node 2 -m tests.support.rank_runs URL MODEL OUT     every case, results in OUT
trained(case, World(), ...)                                              the same on one rank: the oracle
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.distributed import World, open_world
from axolotl.core.trainers.grpo.protocols import DataProducer, GenerationBackend
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer
from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.span import Span
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow, RewardRequest, RewardResult
from axolotl.serving.wire import Sampling
from tests.support.recorded import arguments, tiny_policy
from tests.support.served import claimed, served_trainer

# One more than two steps take.
PROMPTS = [(10 + place, 40, 50 + place) for place in range(9)]
GROUPS, GROUP_SIZE, TOKENS, STEPS = 4, 4, 6, 4
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@dataclass(frozen=True)
class Case:
    """step: further fields of `StepSpec`. depth: rollouts made ahead. flat: rows whose completions all get one reward.
    arguments: of TRL."""

    loss_type: str
    step: dict[str, Any] = field(default_factory=dict)
    depth: int = 0
    flat: frozenset[int] = frozenset()
    scale: Any = "group"
    micro_batch_size: int = GROUP_SIZE
    arguments: dict[str, Any] = field(default_factory=dict)


def streaming(loss_type: str, **more: Any) -> Case:
    return Case(loss_type, step={"groups_per_chunk": 1, "trains_early": True}, **more)


# Of the rows 0 1 | 2 3 and 4 5 | 6 7 that two ranks train on in turn: all of a rank, one of a rank, in the last step.
FLAT = frozenset({0, 1, 6})
SKIPS = {"skips_zero_signal": True}

CASES: dict[str, Case] = {
    **{loss: Case(loss) for loss in LOSSES},
    **{f"streaming {loss}": streaming(loss) for loss in ("grpo", "bnpo", "dapo", "vespo")},
    **{f"skip {loss}": Case(loss, SKIPS, flat=FLAT, micro_batch_size=3) for loss in ("grpo", "dapo")},
    "skip streaming": replace(streaming("dapo", flat=FLAT), step={**streaming("dapo").step, **SKIPS}),
    "skip everything": Case("grpo", SKIPS, flat=frozenset(range(9))),
    "ahead": Case("dapo", depth=1),
    "ahead streaming": streaming("grpo", depth=1),
    "interval": Case("grpo", {"sync_interval": 2}),
    "batch scale": Case("grpo", scale="batch", flat=FLAT),
    "kl": Case("grpo", arguments={"beta": 0.1}),
    "checkpointing": Case(
        "dapo", arguments={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    ),
    "slices": Case("dapo", {"span": Span(2, 2)}),
}


@dataclass(frozen=True)
class Trained:
    """log: what the first rank logged, an entry a step."""

    weights: dict[str, torch.Tensor]
    log: list[dict[str, float]]


@dataclass(frozen=True)
class Ragged:
    """Completions of different lengths, as their first token says."""

    backend: GenerationBackend
    is_thread_safe: bool = True

    def generate(
        self, rows: Sequence[PromptRow], seeds: Sequence[Sequence[int]], sampling: Sampling, version: int
    ) -> Iterator[tuple[int, CompletionGroup]]:
        for place, group in self.backend.generate(rows, seeds, sampling, version):
            completions = []
            for whole in group.completions:
                length = 1 + whole.ids[0] % TOKENS
                assert whole.logprobs is not None
                completions.append(replace(whole, ids=whole.ids[:length], logprobs=whole.logprobs[:length]))
            yield place, replace(group, completions=tuple(completions))

    def close(self) -> None:
        self.backend.close()


@dataclass(frozen=True)
class Rewards:
    """The mean token over 100, and nothing for rows that are flat."""

    flat: frozenset[int]
    names: tuple[str, ...] = ("mean",)

    def score(self, request: RewardRequest) -> RewardResult:
        pairs = zip(request.columns["row"], request.completion_ids, strict=True)
        values = [0.0 if row in self.flat else sum(ids) / len(ids) / 100 for row, ids in pairs]
        return RewardResult(torch.tensor(values).unsqueeze(1), {}, {})

    def close(self) -> None: ...


def trained(case: Case, world: World, url: str, model_dir: Path, directory: Path) -> Trained:
    """Train on this rank; the others do so at the same time."""
    torch.manual_seed(7)
    model, tokenizer = tiny_policy(model_dir)
    rows = GROUPS * GROUP_SIZE // world.size
    settings: dict[str, Any] = {
        # Plain descent: Adam would turn a rounding of a gradient near zero into a whole step.
        "optim": "sgd",
        "learning_rate": 0.1,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP_SIZE,
        "max_completion_length": TOKENS,
        "max_steps": STEPS,
        "loss_type": case.loss_type,
        "beta": 0.0,
        "scale_rewards": case.scale,
    }
    estimate = rows * TOKENS / 2

    def make_producer(maker: GroupMaker) -> DataProducer:
        ragged = replace(maker, backend=Ragged(maker.backend))
        return BackgroundProducer(ragged.make, depth=case.depth, close_backend=ragged.backend.close)

    with claimed(url, directory, world) as client:
        trainer = served_trainer(
            model,
            tokenizer,
            arguments(directory / "out", **{**settings, **case.arguments}),
            client,
            directory,
            prompts=PROMPTS,
            spec=StepSpec(
                case.micro_batch_size, case.loss_type, rows_per_step=rows, token_estimate=estimate, **case.step
            ),
            prompts_per_step=GROUPS // world.size,
            make_producer=make_producer,
            rewards=Rewards(case.flat),
            importance=ImportanceSpec("token_truncate", cap=3.0),
            scale=case.scale,
            world=world,
        )
        trainer.train()
        trainer.pipeline.close()
        policy = trainer.policy().named_parameters()
        weights = {name: value.detach().clone() for name, value in policy if value.requires_grad}
    return Trained(weights, [entry for entry in trainer.state.log_history if "loss" in entry])


def main(url: str, model_dir: str, out: str) -> None:
    torch.set_num_threads(1)
    with open_world(60.0) as world, world.telling():
        for name, case in CASES.items():
            result = trained(case, world, url, Path(model_dir), Path(out) / "sync")
            torch.save((result.weights, result.log), Path(out) / f"{name}.{world.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
