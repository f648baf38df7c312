"""The config cut into the small frozen specs that the parts of the pipeline work with: pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.serving.wire import Sampling, without_nulls
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import uses_server


@dataclass(frozen=True)
class StepSpec:
    """One optimizer step. micro_batch_size counts completions, sync_interval optimizer steps."""

    micro_batch_size: int
    loss_type: str
    sync_interval: int = 1
    mask_truncated: bool = False


def step_spec(config: AxolotlConfig) -> StepSpec:
    assert config.trl.loss_type is not None and config.trl.vllm_sync_interval is not None
    return StepSpec(
        micro_batch_size=config.micro_batch_size,
        loss_type=config.trl.loss_type,
        # Without a server nothing is ever behind, whatever the interval.
        sync_interval=config.trl.vllm_sync_interval if uses_server(config) else 1,
        mask_truncated=config.trl.mask_truncated_completions,
    )


def sampling(config: AxolotlConfig, *, end_token: int | None = None) -> Sampling:
    """How completions are drawn, in the words of the protocol.

    Args:
        end_token: one that the config made an end token; the generator knows those of the base model only.
    """
    trl = config.trl
    extra = without_nulls(trl.generation_kwargs or {})
    stops = extra.get("stop_token_ids", [])
    # What is no list is for the engine to refuse, in its own words.
    if end_token is not None and isinstance(stops, list):
        extra["stop_token_ids"] = stops if end_token in stops else [*stops, end_token]
    assert trl.max_completion_length is not None and trl.num_generations is not None
    return Sampling(
        n=trl.num_generations,
        max_tokens=trl.max_completion_length,
        temperature=cast(float, trl.temperature),
        top_p=cast(float, trl.top_p),
        top_k=cast(int, trl.top_k),
        min_p=trl.min_p or 0.0,
        repetition_penalty=cast(float, trl.repetition_penalty),
        structured_regex=trl.vllm_guided_decoding_regex,
        extra=extra,
    )


def importance_spec(config: AxolotlConfig) -> ImportanceSpec | None:
    """None where nothing needs correcting: the policy samples by itself, or the user switched the correction off."""
    trl = config.trl
    if not (trl.use_vllm and trl.vllm_importance_sampling_correction):
        return None
    assert trl.vllm_importance_sampling_mode is not None
    return ImportanceSpec(
        mode=trl.vllm_importance_sampling_mode,
        cap=trl.vllm_importance_sampling_clip_max,
        floor=trl.vllm_importance_sampling_clip_min,
    )


def advantage_spec(config: AxolotlConfig, num_functions: int) -> AdvantageSpec:
    trl = config.trl
    assert trl.multi_objective_aggregation is not None and trl.num_generations is not None
    return AdvantageSpec(
        group_size=trl.num_generations,
        weights=tuple(trl.reward_weights or [1.0] * num_functions),
        aggregation=trl.multi_objective_aggregation,
        scale=trl.scale_rewards,
    )
