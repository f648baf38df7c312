"""The composition root of a GRPO run: the only place that picks concrete parts and joins them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig  # type: ignore[attr-defined]

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec
from axolotl.core.trainers.grpo.algo.shares import TOKEN_LOSSES
from axolotl.core.trainers.grpo.args import grpo_arguments
from axolotl.core.trainers.grpo.distributed import World
from axolotl.core.trainers.grpo.generation.server import ServerBackend
from axolotl.core.trainers.grpo.generation.transformers import TransformersBackend
from axolotl.core.trainers.grpo.pipeline import RolloutPipeline
from axolotl.core.trainers.grpo.protocols import DataProducer, GenerationBackend, RewardRunner, WeightSync
from axolotl.core.trainers.grpo.replaying import Replay
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer
from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.rollout.planning import Planner, Reroll
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer
from axolotl.core.trainers.grpo.rollout.rank_shares import rank_share
from axolotl.core.trainers.grpo.rollout.replay import ReplayBuffer, ReplaySpec
from axolotl.core.trainers.grpo.rollout.reroll import RerollQueue, RerollSpec, first_reroll_step, most_rerolls
from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.schedule import check_schedule
from axolotl.core.trainers.grpo.scoring import Scorer
from axolotl.core.trainers.grpo.specs import StepSpec, advantage_spec, importance_spec, sampling, span, step_spec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer, Evaluate
from axolotl.core.trainers.grpo.types import CompletionGroup, Order, PromptRow, Slot
from axolotl.core.trainers.grpo.weight_sync.agreement import tolerance
from axolotl.core.trainers.grpo.weight_sync.delivery import Delivery
from axolotl.core.trainers.grpo.weight_sync.direct import DirectWeights
from axolotl.core.trainers.grpo.weight_sync.full_weights import FullWeights
from axolotl.core.trainers.grpo.weight_sync.in_process import InProcessSync
from axolotl.core.trainers.grpo.weight_sync.lora_files import LoraFiles
from axolotl.core.trainers.grpo.weight_sync.nccl import NcclSender
from axolotl.core.trainers.grpo.weight_sync.probe import PolicyProbe, Probe
from axolotl.core.trainers.grpo.weight_sync.proof import ProvenSync
from axolotl.core.trainers.grpo.weight_sync.shared import SharedSync
from axolotl.core.trainers.grpo.weight_sync.transport import choose_transport, trainer_side
from axolotl.data.prompts import PromptData, check_room
from axolotl.loaders.model import load_model, lora_config
from axolotl.loaders.precision import Precision
from axolotl.loaders.refusals import refused_by_libraries
from axolotl.serving.engines.options import token_rules
from axolotl.serving.link import ServerLink
from axolotl.serving.wire import WeightTransport
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import batch_plan

# Of the seeds of held-out prompts.
_EVALUATION_EPOCH = -1


@dataclass(frozen=True)
class Parts:
    """What a GRPO trainer is made of.

    server: None when the policy generates in process. waiting: entered while the main thread waits for completions, so
    that a signal can end the wait. world: the processes that train together.
    """

    config: AxolotlConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptData
    rewards: RewardRunner
    device: str
    precision: Precision
    server: ServerLink | None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    world: World = field(default_factory=World)


def build_sampler(config: AxolotlConfig, num_prompts: int, world: World) -> GroupSampler:
    """Raises `DataError` when the data set does not fill one step."""
    return GroupSampler(
        num_prompts,
        batch_plan(config).prompts_per_step,
        seed=config.seed,
        num_ranks=world.size,
        rank=world.rank,
        span=span(config),
    )


def assemble(parts: Parts) -> AxolotlGRPOTrainer:
    """A trainer that is ready to train."""
    config = parts.config
    sampler = build_sampler(config, len(parts.prompts.train), parts.world)
    if parts.server is not None:
        _transport(parts, parts.server)  # refuses before the model is loaded
    trainer = _trl_trainer(parts, sampler)
    trainer.remove_callback(PrinterCallback)
    sync = _weight_sync(parts, trainer)
    backend = _backend(parts, trainer)
    pipeline = _pipeline(parts, trainer, sync, backend, sampler)
    trainer.attach(
        pipeline,
        sampler,
        importance=importance_spec(config),
        evaluation=_evaluation(parts, backend),
    )
    trainer.extra_state = partial(_save_rollouts, pipeline)
    return trainer


def resume_rollouts(trainer: AxolotlGRPOTrainer, checkpoint: Path) -> None:
    """What the checkpoint keeps of the pipeline; one that was written without this part keeps nothing."""
    directory = _rollouts(trainer.pipeline, checkpoint)
    if directory.is_dir():
        trainer.pipeline.load_state(directory)


def _save_rollouts(pipeline: RolloutPipeline, checkpoint: Path) -> None:
    directory = _rollouts(pipeline, checkpoint)
    directory.mkdir(parents=True)
    pipeline.save_state(directory)


def _rollouts(pipeline: RolloutPipeline, checkpoint: Path) -> Path:
    return checkpoint / "rollouts" / f"rank-{pipeline.accelerator.process_index}"


def _trl_trainer(parts: Parts, sampler: GroupSampler) -> AxolotlGRPOTrainer:
    """Raises `ConfigError` for what the libraries refuse: arguments, adapter, optimizer."""
    config = parts.config
    with refused_by_libraries():
        args = _arguments(parts, sampler)
        if parts.server is None:
            # The server says so itself; in process nobody would before the first step.
            token_rules(sampling(config), frozenset())
    check_schedule(args, _num_steps(args, sampler))
    model = load_model(config, parts.tokenizer, parts.precision, parts.device)
    if parts.server is None:
        _check_positions(parts, model)
    with refused_by_libraries():
        trainer = AxolotlGRPOTrainer(
            model=model,
            reward_funcs=[_named(name) for name in parts.rewards.names],
            args=args,
            train_dataset=parts.prompts.train.dataset,
            eval_dataset=parts.prompts.evaluation.dataset if parts.prompts.evaluation else None,
            processing_class=parts.tokenizer,
            peft_config=lora_config(config),
        )
        trainer.create_optimizer()
    return trainer


def _arguments(parts: Parts, sampler: GroupSampler) -> GRPOConfig:
    autocast = parts.precision.autocast
    kwargs = grpo_arguments(
        parts.config,
        device=parts.device,
        steps_per_epoch=sampler.steps_per_epoch,
        autocast=None if autocast is None else str(autocast).removeprefix("torch."),
    )
    return GRPOConfig(**kwargs)


def _check_positions(parts: Parts, model: PreTrainedModel) -> None:
    """A server tells its limit; in process it is the model's own, where its config names one."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        check_room(parts.prompts, parts.config, limit, name="max_position_embeddings of base_model")


def _num_steps(args: GRPOConfig, sampler: GroupSampler) -> int:
    """Optimizer steps of the run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.steps_per_epoch)


def _weight_sync(parts: Parts, trainer: AxolotlGRPOTrainer) -> WeightSync:
    if parts.server is None:
        return InProcessSync(trainer.policy)
    if parts.world.size == 1:
        return _proven_sync(parts, trainer, parts.server)
    inner = _proven_sync(parts, trainer, parts.server) if parts.world.is_main else None
    return SharedSync(parts.world, inner, keeps_versions=parts.config.trl.vllm_lora_sync)


def _proven_sync(parts: Parts, trainer: AxolotlGRPOTrainer, server: ServerLink) -> ProvenSync:
    config, client = parts.config, server.client
    probe = Probe.of_prompt(parts.prompts.train[0].ids, client.info.max_model_len)
    return ProvenSync(
        _delivery(parts, trainer, server),
        client,
        PolicyProbe(trainer.policy, probe, cast(float, config.trl.temperature)),
        tolerance=tolerance(
            is_half=_is_half(parts.precision) or client.info.dtype != "float32",
            is_quantised=config.adapter == "qlora" or bool(config.load_in_4bit or config.load_in_8bit),
        ),
        check_interval=config.trl.sync_check_interval,
    )


def _delivery(parts: Parts, trainer: AxolotlGRPOTrainer, server: ServerLink) -> Delivery:
    if parts.config.trl.vllm_lora_sync:
        return LoraFiles(lambda: cast(PeftModel, trainer.policy()), server.client, server.directory)
    if _transport(parts, server) == "files":
        return FullWeights(trainer.policy, server.client, server.weights_directory)
    sender = NcclSender(torch.device(parts.device).index or 0)
    direct = DirectWeights(trainer.policy, server.client, server.weights_directory, sender)
    direct.connect(is_required=parts.config.trl.weight_sync == "nccl")
    return direct


def _transport(parts: Parts, server: ServerLink) -> WeightTransport:
    """Raises `ConfigError` when the config wants what the two sides cannot do."""
    if parts.config.trl.vllm_lora_sync:
        return "files"
    return choose_transport(parts.config.trl.weight_sync, server.client.info, trainer_side(parts.device))


def _is_half(precision: Precision) -> bool:
    return precision.weights != torch.float32 or precision.autocast is not None


def _backend(parts: Parts, trainer: AxolotlGRPOTrainer) -> GenerationBackend:
    if parts.server is not None:
        return ServerBackend(parts.server.client)
    chunk = step_spec(parts.config).groups_per_chunk
    return TransformersBackend(
        trainer.policy,
        eos_token_ids=trainer.eos_token_ids,
        pad_token_id=parts.tokenizer.pad_token_id,
        **({} if chunk is None else {"prompts_per_batch": chunk}),
    )


def _maker(parts: Parts, backend: GenerationBackend, rows: Sequence[PromptRow]) -> GroupMaker:
    end_token = parts.tokenizer.eos_token_id if _has_own_end_token(parts.config) else None
    return GroupMaker(rows, backend, sampling(parts.config, end_token=end_token), parts.config.seed)


def _producer(parts: Parts, maker: GroupMaker) -> DataProducer:
    """A thread wherever it may be one: even in turn, the server begins while the proof of its weights is finished."""
    trl = parts.config.trl
    if not maker.backend.is_thread_safe:
        return SyncProducer(maker)
    return BackgroundProducer(
        maker.make,
        depth=cast(int, trl.prefetch_depth) if trl.async_prefetch else 0,
        waiting=parts.waiting,
        close_backend=maker.backend.close,
    )


def _evaluation(parts: Parts, backend: GenerationBackend) -> tuple[int, Evaluate] | None:
    """Held-out prompts are made when they are asked for, on the main thread, with seeds of an epoch of their own."""
    rows = parts.prompts.evaluation
    if not rows:
        return None
    maker = _maker(parts, backend, rows)

    def evaluate(index: int, version: int) -> list[CompletionGroup]:
        return [group for _, group in maker.make(Order(0, _EVALUATION_EPOCH, version, (Slot(index),)))]

    return len(rows), evaluate


def _pipeline(
    parts: Parts, trainer: AxolotlGRPOTrainer, sync: WeightSync, backend: GenerationBackend, sampler: GroupSampler
) -> RolloutPipeline:
    spec = advantage_spec(parts.config, len(parts.rewards.names))
    tokenizer = parts.tokenizer
    num_steps = _num_steps(cast(GRPOConfig, trainer.args), sampler)
    return RolloutPipeline(
        spec=_step_spec(parts.config, trainer),
        planner=Planner(sampler, num_steps, _reroll(parts.config, num_steps, parts.world)),
        producer=_producer(parts, _maker(parts, backend, parts.prompts.train)),
        scorer=Scorer(parts.rewards, tokenizer, spec, lambda: trainer.state, parts.world),
        collate=partial(collate, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id),
        sync=sync,
        accelerator=trainer.accelerator,
        world=parts.world,
        replay=_replay(parts.config, spec, parts.world),
        rows=parts.prompts.train,
    )


def _replay(config: AxolotlConfig, spec: AdvantageSpec, world: World) -> Replay | None:
    """The rank's part of the replay buffer, empty; None when it is off."""
    trl = config.trl
    if not trl.replay_buffer_size:
        return None
    buffer = ReplayBuffer(
        ReplaySpec(
            rank_share(trl.replay_buffer_size, world.size, world.rank), trl.replay_max_age, config.seed, world.rank
        )
    )
    return Replay(buffer, spec, trl.replay_recompute_logps)


def _reroll(config: AxolotlConfig, planned_steps: int, world: World) -> Reroll | None:
    """The queue of failed prompts, empty; None when it is off."""
    trl = config.trl
    if trl.reroll_start_fraction >= 1.0:
        return None
    first = first_reroll_step(trl.reroll_start_fraction, planned_steps)
    capacity = most_rerolls(first, planned_steps, trl.reroll_max_groups, span(config).length)
    own = rank_share(capacity, world.size, world.rank)
    queue = RerollQueue(RerollSpec(own, first, world.size, world.rank))
    return Reroll(queue, trl.reroll_max_groups, trl.reroll_threshold, world.size, world.rank)


def _step_spec(config: AxolotlConfig, trainer: AxolotlGRPOTrainer) -> StepSpec:
    """An auxiliary loss of a mixture of experts is part of every completion's gradient, and not divided by tokens."""
    spec = step_spec(config)
    if not trainer.aux_loss_enabled:
        return spec
    is_early = spec.trains_early and spec.loss_type not in TOKEN_LOSSES
    return replace(spec, skips_zero_signal=False, trains_early=is_early)


def _has_own_end_token(config: AxolotlConfig) -> bool:
    """Whether the config's end token may be another than the base model's, which is all that the server knows."""
    return config.special_tokens.eos_token is not None or config.tokenizer_config is not None


def _named(name: str) -> Callable[..., list[float | None]]:
    """TRL wants reward functions to name its columns; ours are called by the pipeline."""

    def reward(**_: object) -> list[float | None]:
        raise AssertionError("reward functions are called by the pipeline")

    reward.__name__ = name
    return reward
