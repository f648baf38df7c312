"""The config cut into the small frozen specs that the parts of the pipeline work with: pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.algo.shares import TOKEN_LOSSES
from axolotl.core.trainers.grpo.span import ONE_STEP, Span
from axolotl.serving.wire import Sampling, without_nulls
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import batch_plan, slices_per_rollout, steps_per_rollout, uses_server


@dataclass(frozen=True)
class StepSpec:
    """One optimizer step. micro_batch_size counts completions, sync_interval optimizer steps.

    skips_zero_signal: groups whose advantages are all 0 take part in no forward pass. groups_per_chunk: groups that are
    scored together; None for all. trains_early: chunks are trained before the last of them is scored, so that losses
    are divided by an estimate of the step's tokens first. rows_per_step: completions of one rank. span: the steps of a
    rollout; groups_per_chunk then counts groups of the rollout.
    """

    micro_batch_size: int
    loss_type: str
    sync_interval: int = 1
    mask_truncated: bool = False
    skips_zero_signal: bool = False
    groups_per_chunk: int | None = None
    trains_early: bool = False
    rows_per_step: int = 0
    token_estimate: float = 1.0
    span: Span = ONE_STEP


def step_spec(config: AxolotlConfig) -> StepSpec:
    assert config.trl.loss_type is not None and config.trl.vllm_sync_interval is not None
    return StepSpec(
        micro_batch_size=config.micro_batch_size,
        loss_type=config.trl.loss_type,
        # Without a server nothing is ever behind, whatever the interval.
        sync_interval=config.trl.vllm_sync_interval if uses_server(config) else 1,
        mask_truncated=config.trl.mask_truncated_completions,
        skips_zero_signal=config.trl.skip_zero_advantage_batches and not reasons_not_to_skip(config),
        span=span(config),
        **_streaming(config),
    )


def span(config: AxolotlConfig) -> Span:
    assert config.trl.num_iterations is not None, "resolve() fills num_iterations"
    return Span(slices_per_rollout(config), config.trl.num_iterations)


def _streaming(config: AxolotlConfig) -> dict[str, Any]:
    trl, plan = config.trl, batch_plan(config)
    if not trl.streaming_partial_batch or needs_whole_batch(config):
        return {}
    assert trl.streaming_min_groups is not None and trl.max_completion_length is not None
    return {
        "groups_per_chunk": trl.streaming_min_groups,
        "trains_early": not needs_lengths_first(config),
        "rows_per_step": plan.completions_per_step,
        # Near the truth, so that losses keep their usual size in half precision.
        "token_estimate": plan.completions_per_step * trl.max_completion_length / 2,
    }


def needs_whole_batch(config: AxolotlConfig) -> str:
    """Why advantages need all of a step's rewards, empty where they do not."""
    if config.trl.scale_rewards == "batch":
        return "scale_rewards: batch"
    if config.trl.multi_objective_aggregation == "normalize_then_sum":
        return "multi_objective_aggregation: normalize_then_sum"
    return ""


def needs_lengths_first(config: AxolotlConfig) -> str:
    """Why the losses of a streaming step need the number of its tokens at once, empty where one rescale does it."""
    if config.trl.loss_type not in TOKEN_LOSSES:
        return ""
    if config.deepspeed:
        return "deepspeed"
    return "entropy_coef" if config.trl.entropy_coef else ""


def reasons_not_to_skip(config: AxolotlConfig) -> str:
    """What gives groups without an advantage a gradient, or a part in that of others; empty where nothing does."""
    if config.trl.beta:
        return "beta"
    if config.trl.entropy_coef:
        return "entropy_coef"
    if config.trl.top_entropy_quantile not in (None, 1.0):
        return "top_entropy_quantile"
    return ""


def pipeline_notes(config: AxolotlConfig) -> list[str]:
    """What options of the pipeline do not do in this config, a line each."""
    trl, notes = config.trl, []
    if trl.skip_zero_advantage_batches and (reason := reasons_not_to_skip(config)):
        notes.append(f"skip_zero_advantage_batches skips nothing: with {reason} every completion has a gradient")
    if trl.streaming_partial_batch:
        if reason := needs_whole_batch(config):
            notes.append(f"streaming_partial_batch waits for all groups of a step: {reason} compares them")
        elif reason := needs_lengths_first(config):
            notes.append(f"streaming_partial_batch trains when all groups are there: {reason} needs their lengths")
    if config.max_steps is not None and config.max_steps % steps_per_rollout(config):
        notes.append(
            f"warning: max_steps {config.max_steps} ends in the middle of a rollout, which is trained for "
            f"{steps_per_rollout(config)} steps: the rest of it is not trained"
        )
    old = [
        name
        for name, is_used in {
            "async_prefetch": trl.async_prefetch,
            "vllm_sync_interval": uses_server(config) and (trl.vllm_sync_interval or 1) > 1,
            "replay_buffer_size": trl.replay_buffer_size > 0,
        }.items()
        if is_used
    ]
    if old and not importance_spec(config):
        notes.append(
            f"warning: {', '.join(old)} without vllm_importance_sampling_correction: completions of an older policy "
            "are trained on as if they were of this one"
        )
    if trl.replay_buffer_size and not trl.replay_recompute_logps:
        notes.append(
            "warning: replay_recompute_logps: false: replayed groups are weighted by the policy that first trained them"
        )
    return notes


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
