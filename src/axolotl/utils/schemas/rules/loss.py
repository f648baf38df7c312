"""The loss, its weights and its reference model."""

from __future__ import annotations

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.nodes import Path, Problem
from axolotl.utils.schemas.rules.model import changes_base


def one_cap(config: AxolotlConfig) -> list[Problem]:
    """The cap has two names."""
    cap, clip_max = config.trl.vllm_importance_sampling_cap, config.trl.vllm_importance_sampling_clip_max
    if cap is None or clip_max is None or cap == clip_max:
        return []
    message = f"is {cap}, but vllm_importance_sampling_clip_max, the same thing, is {clip_max}; keep one of them"
    return [Problem(("trl", "vllm_importance_sampling_cap"), message)]


def vespo_has_token_weights(config: AxolotlConfig) -> list[Problem]:
    mode = config.trl.vllm_importance_sampling_mode
    if config.trl.loss_type != "vespo" or mode is None or mode.startswith("token_"):
        return []
    message = f"is {mode}; loss_type vespo needs token_truncate or token_mask"
    return [Problem(("trl", "vllm_importance_sampling_mode"), message)]


def clip_range_is_open(config: AxolotlConfig) -> list[Problem]:
    low, high = config.trl.vllm_importance_sampling_clip_min, config.trl.vllm_importance_sampling_clip_max
    if low is None or high is None or low < high:
        return []
    message = f"is {low:g}, which must be below vllm_importance_sampling_clip_max {high:g}"
    return [Problem(("trl", "vllm_importance_sampling_clip_min"), message)]


def reference_is_the_base_model(config: AxolotlConfig) -> list[Problem]:
    """With an adapter the reference policy is the model without it, which must be the base model still."""
    if not config.trl.beta or config.adapter is None:
        return []
    changed = {"lora_bias": config.lora_bias != "none", "peft_init_lora_weights": changes_base(config)}
    message = "changes the base model itself, which trl.beta above 0 needs as the reference; remove one of them"
    return [Problem((name,), message) for name, is_set in changed.items() if is_set]


def reference_can_follow(config: AxolotlConfig) -> list[Problem]:
    """With an adapter the reference is the base model, and without a KL penalty there is none."""
    if not config.trl.sync_ref_model:
        return []
    path: Path = ("trl", "sync_ref_model")
    if config.adapter is not None:
        return [Problem(path, "needs full fine-tuning: with an adapter the reference is the frozen base model")]
    if not config.trl.beta:
        return [Problem(path, "needs trl.beta above 0: without a KL penalty there is no reference model")]
    return []
