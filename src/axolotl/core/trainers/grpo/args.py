"""Our config as the arguments of TRL's `GRPOConfig`: a pure function, so that a test can show every option arriving."""

from __future__ import annotations

from typing import Any

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import batch_plan

# Options whose YAML name is TRL's name; our schema and TRL's agree on their meaning.
_SAME_NAME_TRL = (
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
    "beta",
    "num_iterations",
    "epsilon",
    "epsilon_high",
    "loss_type",
    "scale_rewards",
    "mask_truncated_completions",
    "reward_weights",
    "multi_objective_aggregation",
    "importance_sampling_level",
    "off_policy_mask_threshold",
    "use_bias_correction_kl",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "log_completions",
    "num_completions_to_print",
)
