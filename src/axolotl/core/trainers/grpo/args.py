"""Our config as the arguments of TRL's `GRPOConfig`: pure functions, so that a test can show every option arriving."""

from __future__ import annotations

from typing import Any

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import batch_plan

# Options under `trl:` that TRL knows by the same name and meaning.
_TRL_NAMES = (
    "beta",
    "chat_template_kwargs",
    "delta",
    "disable_dropout",
    "entropy_coef",
    "epsilon",
    "epsilon_high",
    "generation_kwargs",
    "importance_sampling_level",
    "log_completions",
    "loss_type",
    "mask_truncated_completions",
    "max_completion_length",
    "min_p",
    "multi_objective_aggregation",
    "num_completions_to_print",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "off_policy_mask_threshold",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "repetition_penalty",
    "reward_weights",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "scale_rewards",
    "sync_ref_model",
    "temperature",
    "top_entropy_quantile",
    "top_k",
    "top_p",
    "use_bias_correction_kl",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)

# Top-level options that transformers knows by the same name and meaning.
_TOP_LEVEL_NAMES = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "ddp_backend",
    "ddp_find_unused_parameters",
    "greater_is_better",
    "hub_model_id",
    "learning_rate",
    "load_best_model_at_end",
    "logging_steps",
    "lr_scheduler_kwargs",
    "max_grad_norm",
    "metric_for_best_model",
    "neftune_noise_alpha",
    "output_dir",
    "save_only_model",
    "seed",
    "torch_compile_backend",
    "torch_compile_mode",
    "trackio_space_id",
    "trust_remote_code",
    "weight_decay",
)


def grpo_arguments(config: AxolotlConfig, *, device: str, steps_per_epoch: int, autocast: str | None) -> dict[str, Any]:
    """Keyword arguments for `trl.GRPOConfig`.

    TRL is built without vLLM and with one "batch" a step: generation and micro-batches are ours (see `trainer.py`).

    Args:
        steps_per_epoch: optimizer steps that one pass over the prompts takes.
        autocast: `bfloat16`, `float16` or None, as resolved for the device.
    """
    plan = batch_plan(config)
    kwargs = {name: getattr(config.trl, name) for name in _TRL_NAMES}
    kwargs |= {name: getattr(config, name) for name in _TOP_LEVEL_NAMES}
    kwargs |= _schedule(config) | _saving(config, steps_per_epoch) | _evaluation(config, steps_per_epoch)
    kwargs |= {
        "use_vllm": False,
        "per_device_train_batch_size": plan.completions_per_step,
        "per_device_eval_batch_size": plan.num_generations,
        "gradient_accumulation_steps": 1,
        "optim": config.optimizer,
        "optim_args": _optim_args(config.optim_args),
        "bf16": autocast == "bfloat16",
        "fp16": autocast == "float16",
        "tf32": config.tf32 if device == "cuda" and config.tf32 != "auto" else None,
        "use_cpu": device == "cpu",
        "gradient_checkpointing": bool(config.gradient_checkpointing),
        # Re-entrant checkpointing breaks with adapters under DDP ("marked ready only once") and with FSDP.
        "gradient_checkpointing_kwargs": {"use_reentrant": False, **(config.gradient_checkpointing_kwargs or {})},
        "torch_compile": config.torch_compile is True,
        "report_to": reporters(config),
        "run_name": config.wandb_name or config.trackio_run_name,
        "project": config.trackio_project_name or "huggingface",
        "remove_unused_columns": False,
        # The filter would replace a NaN loss by the average of the past, and nobody would ever see it.
        "logging_nan_inf_filter": False,
        # The progress line is ours.
        "disable_tqdm": True,
        "push_to_hub": config.hub_model_id is not None,
        # What the reference model of full fine-tuning is loaded with.
        "model_init_kwargs": {"revision": config.revision_of_model} if config.revision_of_model else None,
    }
    if config.ddp_timeout is not None:
        kwargs["ddp_timeout"] = config.ddp_timeout
    return kwargs


def reporters(config: AxolotlConfig) -> list[str]:
    """Where metrics go besides `metrics.jsonl`."""
    asked = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or [])
    names = [name for name in asked if name != "none"]
    if config.use_wandb or (config.use_wandb is None and config.wandb_project):
        names.append("wandb")
    if config.use_tensorboard:
        names.append("tensorboard")
    if config.use_trackio or (config.use_trackio is None and config.trackio_project_name):
        names.append("trackio")
    return sorted(set(names))


def reporter_environment(config: AxolotlConfig) -> dict[str, str]:
    """Environment variables that transformers' reporters read their settings from."""
    settings = {
        "WANDB_PROJECT": config.wandb_project,
        "WANDB_ENTITY": config.wandb_entity,
        "WANDB_NAME": config.wandb_name,
        "WANDB_RUN_ID": config.wandb_run_id,
        "WANDB_MODE": config.wandb_mode,
        "WANDB_WATCH": config.wandb_watch,
        "WANDB_LOG_MODEL": config.wandb_log_model,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _schedule(config: AxolotlConfig) -> dict[str, Any]:
    warmup = config.warmup_steps if config.warmup_steps is not None else (config.warmup_ratio or 0)
    return {
        "num_train_epochs": config.num_epochs,
        "max_steps": config.max_steps if config.max_steps is not None else -1,
        "lr_scheduler_type": config.lr_scheduler,
        "warmup_steps": int(warmup) if warmup >= 1 else warmup,
    }


def _saving(config: AxolotlConfig, steps_per_epoch: int) -> dict[str, Any]:
    strategy, steps = _when(config.save_strategy, config.save_steps, config.saves_per_epoch, steps_per_epoch, "epoch")
    return {"save_strategy": strategy, "save_steps": steps}


def _evaluation(config: AxolotlConfig, steps_per_epoch: int) -> dict[str, Any]:
    if not config.val_set_size:
        return {"eval_strategy": "no"}
    strategy, steps = _when(config.eval_strategy, config.eval_steps, config.evals_per_epoch, steps_per_epoch, "epoch")
    return {"eval_strategy": strategy, "eval_steps": steps, "do_eval": strategy != "no"}


def _when(
    strategy: str | None, steps: float | None, times_per_epoch: int | None, steps_per_epoch: int, otherwise: str
) -> tuple[str, float]:
    """Strategy and interval: a number of steps wins over times per epoch, a strategy that is written over both."""
    if times_per_epoch and steps is None:
        steps = max(1, steps_per_epoch // times_per_epoch)
    if strategy is None:
        strategy = "steps" if steps is not None else otherwise
    return strategy, steps if steps is not None else 500


def _optim_args(value: str | dict[str, object] | None) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{name}={setting}" for name, setting in value.items())
    return value
