"""The composition root of a GRPO run: the only place that picks concrete parts and joins them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig  # type: ignore[attr-defined]

from axolotl.core.trainers.grpo.args import grpo_arguments
from axolotl.core.trainers.grpo.generation.server import ServerBackend
from axolotl.core.trainers.grpo.generation.transformers import TransformersBackend
from axolotl.core.trainers.grpo.pipeline import RolloutPipeline
from axolotl.core.trainers.grpo.protocols import GenerationBackend, RewardRunner, WeightSync
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer
from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.schedule import check_schedule
from axolotl.core.trainers.grpo.scoring import Scorer
from axolotl.core.trainers.grpo.specs import advantage_spec, importance_spec, sampling, step_spec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.core.trainers.grpo.weight_sync.agreement import tolerance
from axolotl.core.trainers.grpo.weight_sync.delivery import Delivery
from axolotl.core.trainers.grpo.weight_sync.direct import DirectWeights
from axolotl.core.trainers.grpo.weight_sync.full_weights import FullWeights
from axolotl.core.trainers.grpo.weight_sync.in_process import InProcessSync
from axolotl.core.trainers.grpo.weight_sync.lora_files import LoraFiles
from axolotl.core.trainers.grpo.weight_sync.nccl import NcclSender
from axolotl.core.trainers.grpo.weight_sync.probe import PolicyProbe, Probe
from axolotl.core.trainers.grpo.weight_sync.proof import ProvenSync
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


@dataclass(frozen=True)
class Parts:
    """What a GRPO trainer is made of. server: None when the policy generates in process."""

    config: AxolotlConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptData
    rewards: RewardRunner
    device: str
    precision: Precision
    server: ServerLink | None


def build_sampler(config: AxolotlConfig, num_prompts: int) -> GroupSampler:
    """Raises `DataError` when the data set does not fill one step."""
    return GroupSampler(num_prompts, batch_plan(config).prompts_per_step, seed=config.seed)


def assemble(parts: Parts) -> AxolotlGRPOTrainer:
    """A trainer that is ready to train."""
    config = parts.config
    sampler = build_sampler(config, len(parts.prompts.train))
    if parts.server is not None:
        _transport(parts, parts.server)  # refuses before the model is loaded
    trainer = _trl_trainer(parts, sampler)
    trainer.remove_callback(PrinterCallback)
    sync = _weight_sync(parts, trainer)
    producer = _producer(parts, trainer, sync, sampler)
    trainer.attach(
        _pipeline(parts, trainer, sync, producer),
        sampler,
        importance=importance_spec(config),
        evaluation=(parts.prompts.evaluation, producer) if parts.prompts.evaluation else None,
    )
    return trainer


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
    config, client = parts.config, parts.server.client
    probe = Probe.of_prompt(parts.prompts.train[0].ids, client.info.max_model_len)
    return ProvenSync(
        _delivery(parts, trainer, parts.server),
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


def _producer(parts: Parts, trainer: AxolotlGRPOTrainer, sync: WeightSync, sampler: GroupSampler) -> SyncProducer:
    pad, eos = parts.tokenizer.pad_token_id, parts.tokenizer.eos_token_id
    backend: GenerationBackend
    if parts.server is None:
        backend = TransformersBackend(
            trainer.policy,
            sync,
            eos_token_ids=trainer.eos_token_ids,
            pad_token_id=pad,
        )
    else:
        backend = ServerBackend(parts.server.client, sync)
    return SyncProducer(
        rows=parts.prompts.train,
        sampler=sampler,
        backend=backend,
        sampling=sampling(parts.config, end_token=eos if _has_own_end_token(parts.config) else None),
        run_seed=parts.config.seed,
        pad_token_id=pad,
        eos_token_id=eos,
    )


def _pipeline(parts: Parts, trainer: AxolotlGRPOTrainer, sync: WeightSync, producer: SyncProducer) -> RolloutPipeline:
    spec = advantage_spec(parts.config, len(parts.rewards.names))
    return RolloutPipeline(
        spec=step_spec(parts.config),
        producer=producer,
        scorer=Scorer(parts.rewards, parts.tokenizer, spec, lambda: trainer.state),
        sync=sync,
        accelerator=trainer.accelerator,
    )


def _has_own_end_token(config: AxolotlConfig) -> bool:
    """Whether the config's end token may be another than the base model's, which is all that the server knows."""
    return config.special_tokens.eos_token is not None or config.tokenizer_config is not None


def _named(name: str) -> Callable[..., list[float | None]]:
    """TRL wants reward functions to name its columns; ours are called by the pipeline."""

    def reward(**_: object) -> list[float | None]:
        raise AssertionError("reward functions are called by the pipeline")

    reward.__name__ = name
    return reward
