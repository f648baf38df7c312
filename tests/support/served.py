"""Our trainer with completions from a server that has no model: requests, versions and threads are real ones.

The servers are `tests.fakes.server` and the app over `tests.fakes.engine`; their tokens are below 100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel
from trl import GRPOConfig

from axolotl.core.trainers.grpo import assembly
from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec, Scale
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.distributed import World
from axolotl.core.trainers.grpo.generation.server import ServerBackend
from axolotl.core.trainers.grpo.pipeline import RolloutPipeline
from axolotl.core.trainers.grpo.protocols import DataProducer, GenerationBackend, RewardRunner, WeightSync
from axolotl.core.trainers.grpo.replaying import Replay
from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.rollout.planning import Planner, Reroll
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer
from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.scoring import Scorer
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.core.trainers.grpo.types import Order, PromptRow, RewardRequest, RewardResult
from axolotl.core.trainers.grpo.weight_sync.delivery import Delivery
from axolotl.core.trainers.grpo.weight_sync.lora_files import LoraFiles
from axolotl.core.trainers.grpo.weight_sync.shared import SharedSync
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import Sampling
from tests.fakes.engine import FAKE_FINGERPRINT

RUN_ID = "run-served"


@dataclass
class UnprovenSync:
    """A `WeightSync` that believes what the server confirms: one without a model has nothing more to show."""

    delivery: Delivery
    version: int = 0
    keeps_versions: bool = True
    metrics: dict[str, float] = field(default_factory=dict)

    def begin(self, version: int) -> None:
        delivered = self.delivery.deliver(version)
        self.version = version
        self.metrics = {"sync/save": delivered.save_s, "sync/load": delivered.load_s}

    def push(self, version: int) -> None:
        self.begin(version)

    def settle(self) -> None: ...

    def close(self) -> None: ...


class InTurn(SyncProducer):
    """Makes every step's groups in turn, by the version that `versions` names for the step."""

    def __init__(self, maker: GroupMaker, versions: Sequence[int]) -> None:
        super().__init__(maker)
        self._versions = versions

    def place(self, order: Order) -> None:
        super().place(replace(order, version=self._versions[order.step]))


@dataclass(frozen=True)
class TokenRewards:
    """The mean token over 100. calls: how many completions were scored at once, one entry a call."""

    names: tuple[str, ...] = ("mean",)
    calls: list[int] = field(default_factory=list)

    def score(self, request: RewardRequest) -> RewardResult:
        self.calls.append(len(request.completion_ids))
        values = [sum(ids) / len(ids) / 100 for ids in request.completion_ids]
        return RewardResult(torch.tensor(values).unsqueeze(1), {}, {})

    def close(self) -> None: ...


@contextmanager
def claimed(url: str, sync_dir: Path, world: World | None = None) -> Iterator[ServerClient]:
    """A client that holds the server; of several ranks the first does, and the others work under its claim."""
    world = world or World()
    with ServerClient(url, sync_dir, 60.0) as client:
        client.wait_ready()
        world.alone(lambda: client.claim(RUN_ID, FAKE_FINGERPRINT))
        if not world.is_main:
            client.join(RUN_ID, FAKE_FINGERPRINT)
        with client.renewing(for_guests=world.size > 1) if world.is_main else nullcontext():
            yield client
        # Nobody asks any more.
        world.together(lambda: None)
        client.release()


def served_trainer(
    model: PreTrainedModel,
    tokenizer: Any,
    args: GRPOConfig,
    client: ServerClient,
    sync_dir: Path,
    *,
    prompts: Sequence[tuple[int, ...]],
    spec: StepSpec,
    prompts_per_step: int,
    make_producer: Callable[[GroupMaker], DataProducer] = SyncProducer,
    rewards: RewardRunner | None = None,
    reroll: Callable[[int], Reroll | None] = lambda num_steps: None,
    replay: Callable[[AdvantageSpec], Replay] | None = None,
    make_backend: Callable[[ServerClient], GenerationBackend] = ServerBackend,
    importance: ImportanceSpec | None = None,
    modules: Sequence[str] = ("q_proj", "v_proj"),
    scale: Scale = "group",
    world: World | None = None,
) -> AxolotlGRPOTrainer:
    """One whose adapter, on `modules`, goes to the server before every step that asks for it.

    reroll: given the optimizer steps of the run.
    """
    runner, world = rewards or TokenRewards(), world or World()

    def unused(**_: Any) -> list[float]:
        raise AssertionError("rewards are the pipeline's")

    trainer = AxolotlGRPOTrainer(
        model=model,
        reward_funcs=[unused],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["" for _ in prompts]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=4, lora_alpha=8, target_modules=list(modules), task_type="CAUSAL_LM", init_lora_weights=False
        ),
    )
    rows = [PromptRow(index, "", ids, {"row": index}) for index, ids in enumerate(prompts)]
    sampler = GroupSampler(
        len(rows), prompts_per_step, shuffle=False, num_ranks=world.size, rank=world.rank, span=spec.span
    )
    sampling = Sampling(n=args.num_generations, max_tokens=args.max_completion_length)
    sync: WeightSync = UnprovenSync(LoraFiles(trainer.policy, client, sync_dir / "adapters" / RUN_ID))
    if world.size > 1:
        sync = SharedSync(world, sync if world.is_main else None, keeps_versions=True)
    advantages = AdvantageSpec(args.num_generations, (1.0,), scale=scale)
    num_steps = assembly._num_steps(args, sampler)
    pipeline = RolloutPipeline(
        spec=spec,
        planner=Planner(sampler, num_steps, reroll(num_steps)),
        producer=make_producer(GroupMaker(rows, make_backend(client), sampling, run_seed=0)),
        scorer=Scorer(runner, tokenizer, advantages, lambda: trainer.state, world),
        collate=partial(collate, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id),
        sync=sync,
        accelerator=trainer.accelerator,
        world=world,
        replay=replay(advantages) if replay is not None else None,
        rows=rows,
    )
    trainer.attach(pipeline, sampler, importance=importance)
    return trainer
