"""Recorded rollouts fed to TRL's own trainer and to ours, so that the two can be held against each other.

TRL generates inside its own class; `RecordedTRL` answers from the recording there and nowhere else, everything after
generation is TRL's. Ours gets the same recording through a `GenerationBackend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.pipeline import RolloutPipeline
from axolotl.core.trainers.grpo.protocols import DataProducer
from axolotl.core.trainers.grpo.replaying import Replay
from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.rollout.planning import Planner, Reroll
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer
from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.scoring import Scorer
from axolotl.core.trainers.grpo.span import ONE_STEP
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow, RewardRequest, RewardResult
from axolotl.core.trainers.grpo.weight_sync.in_process import InProcessSync
from axolotl.serving.wire import Sampling

PROMPTS = ("What is 1 + 2?", "What is 12 + 7?", "Add two numbers together")
GROUP_SIZE = 8
MAX_COMPLETION = 12


@dataclass(frozen=True)
class Recording:
    """ids, logps: `[prompts][G]` lists of tokens. rewards: `[prompts][G][F]`, NaN where a function abstained."""

    ids: list[list[list[int]]]
    logps: list[list[list[float]]]
    rewards: list[list[list[float]]]


def record(eos: int, *, seed: int = 0, num_functions: int = 1, vocab: int = 300) -> Recording:
    """Random completions of different lengths, two thirds of them ending with the end token."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def one() -> list[int]:
        length = integer(2, MAX_COMPLETION + 1)
        body = [integer(3, vocab) for _ in range(length - 1)]
        return [*body, eos if integer(0, 3) else integer(3, vocab)]

    ids = [[one() for _ in range(GROUP_SIZE)] for _ in PROMPTS]
    logps = [[(-4 - 3 * torch.rand(len(c), generator=generator)).tolist() for c in group] for group in ids]
    rewards = [torch.rand(GROUP_SIZE, num_functions, generator=generator).round(decimals=1).tolist() for _ in PROMPTS]
    return Recording(ids, logps, rewards)


def tiny_policy(directory: Path) -> tuple[PreTrainedModel, Any]:
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), tokenizer


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def arguments(output_dir: Path, **overrides: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_COMPLETION,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_steps": len(PROMPTS),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    return GRPOConfig(**{**settings, **overrides})


def _dataset() -> Dataset:
    return Dataset.from_dict({"prompt": list(PROMPTS)})


class RecordedTRL(GRPOTrainer):
    """TRL's trainer; `recording` answers where it would generate and where it would call reward functions."""

    recording: Recording

    def _generate(self, prompts: list[str]) -> Any:
        seen: dict[str, int] = {}
        self._places = []
        for prompt in prompts:
            index = seen.get(prompt, 0)
            seen[prompt] = index + 1
            self._places.append((PROMPTS.index(prompt), index))
        prompt_ids = [self.processing_class(prompt)["input_ids"] for prompt in prompts]
        ids = [self.recording.ids[p][i] for p, i in self._places]
        logps = [self.recording.logps[p][i] for p, i in self._places]
        return prompt_ids, ids, None, ["" for _ in prompts], logps, {}, None, None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
        return torch.tensor([self.recording.rewards[p][i] for p, i in self._places])


def trl_trainer(
    model: PreTrainedModel, tokenizer: Any, args: GRPOConfig, recording: Recording, *, corrected: bool, **kwargs: Any
) -> RecordedTRL:
    num_functions = len(recording.rewards[0][0])

    def unused(**_: Any) -> list[float]:
        raise AssertionError("rewards come from the recording")

    trainer = RecordedTRL(
        model=model,
        reward_funcs=[unused] * num_functions,
        args=args,
        train_dataset=_dataset(),
        processing_class=tokenizer,
        **kwargs,
    )
    trainer.recording = recording
    trainer.use_vllm = corrected
    trainer.vllm_importance_sampling_correction = corrected
    return trainer


@dataclass(frozen=True)
class RecordedBackend:
    recording: Recording
    is_thread_safe: bool = True

    def generate(
        self, rows: Sequence[PromptRow], seeds: Any, sampling: Sampling, version: int
    ) -> Iterator[tuple[int, CompletionGroup]]:
        for place, row in enumerate(rows):
            recorded = zip(self.recording.ids[row.index], self.recording.logps[row.index], strict=True)
            completions = [
                Completion(
                    tuple(ids), tuple(logps), is_truncated=ids[-1] != 2, adapter_version=version, instance_id="r"
                )
                for ids, logps in recorded
            ]
            yield place, CompletionGroup(row, tuple(completions))

    def close(self) -> None: ...


@dataclass
class RecordedRewards:
    recording: Recording
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.names = tuple(f"f{i}" for i in range(len(self.recording.rewards[0][0])))

    def score(self, request: RewardRequest) -> RewardResult:
        rows = request.columns["row"]
        values = [self.recording.rewards[row][index % GROUP_SIZE] for index, row in enumerate(rows)]
        return RewardResult(torch.tensor(values), {}, {})

    def close(self) -> None: ...


def our_trainer(
    model: PreTrainedModel,
    tokenizer: Any,
    args: GRPOConfig,
    recording: Recording,
    *,
    micro_batch_size: int,
    importance: ImportanceSpec | None,
    prompts_per_step: int = 1,
    mask_truncated: bool = False,
    make_producer: Callable[[GroupMaker], DataProducer] = SyncProducer,
    step: dict[str, Any] | None = None,
    replay: Callable[[AdvantageSpec], Replay] | None = None,
    reroll: Reroll | None = None,
    **kwargs: Any,
) -> AxolotlGRPOTrainer:
    """step: further fields of `StepSpec`."""
    rewards = RecordedRewards(recording)

    def unused(**_: Any) -> list[float]:
        raise AssertionError("rewards come from the recording")

    trainer = AxolotlGRPOTrainer(
        model=model,
        reward_funcs=[unused] * len(rewards.names),
        args=args,
        train_dataset=_dataset(),
        processing_class=tokenizer,
        **kwargs,
    )
    rows = [PromptRow(i, prompt, tuple(tokenizer(prompt)["input_ids"]), {"row": i}) for i, prompt in enumerate(PROMPTS)]
    span = (step or {}).get("span", ONE_STEP)
    sampler = GroupSampler(len(rows), prompts_per_step, shuffle=False, span=span)
    maker = GroupMaker(rows, RecordedBackend(recording), Sampling(n=GROUP_SIZE, max_tokens=MAX_COMPLETION), run_seed=0)
    spec = AdvantageSpec(
        GROUP_SIZE,
        tuple(args.reward_weights or [1.0] * len(rewards.names)),
        aggregation=args.multi_objective_aggregation,
        scale=args.scale_rewards,
    )
    pipeline = RolloutPipeline(
        spec=StepSpec(micro_batch_size, args.loss_type, mask_truncated=mask_truncated, **(step or {})),
        planner=Planner(sampler, args.max_steps, reroll),
        producer=make_producer(maker),
        scorer=Scorer(rewards, tokenizer, spec, lambda: trainer.state),
        collate=partial(collate, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id),
        sync=InProcessSync(trainer.policy),
        accelerator=trainer.accelerator,
        replay=replay(spec) if replay is not None else None,
        rows=rows,
    )
    trainer.attach(pipeline, sampler, importance=importance)
    return trainer


def curve(trainer: GRPOTrainer, *names: str) -> dict[str, list[float]]:
    """Train, and return the logged values of `names`, one a step."""
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [entry[name] for entry in steps] for name in names}
