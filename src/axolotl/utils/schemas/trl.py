"""The `trl:` section: everything that is specific to GRPO.

Where the default is null, `null_means` is TRL's own default, apart from the differences the documentation names; a
contract test compares them with the TRL that is installed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from axolotl.utils.schemas.base import Options, option
from axolotl.utils.schemas.scalars import AsWord, Bool, Float, Free, Int, Text, TextList, read_bool, show

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
ImportanceMode = Literal["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"]


def _read_scale(value: object) -> str:
    if isinstance(value, str) and value in ("group", "batch", "none"):
        return str(value)
    try:
        return "group" if read_bool(value) else "none"
    except ValueError:
        raise ValueError(f"needs true, false, group, batch, none, not {show(value)}") from None


def _read_weights(value: object) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"needs a list of numbers, one a reward function, not {show(value)}")
    return value


class TRLConfig(Options):
    """Options of `trl:`, in the order of the reference."""

    use_vllm: Bool = option(False, "Let a separate server make the completions instead of the training process itself.")
    vllm_mode: Annotated[Literal["server", "colocate"], AsWord] | None = option(
        None, "Where the engine runs: in a server of its own, or inside the trainer.", null_means="server"
    )
    vllm_server_host: Text | None = option(
        None,
        "Where the trainer finds the server; taken from `vllm.host` when unset, and 0.0.0.0 means this machine.",
        null_means="0.0.0.0",
    )
    vllm_server_port: Int | None = option(
        None, "The server's port; taken from `vllm.port` when unset.", null_means=8000, ge=1, le=65535
    )
    vllm_server_timeout: Int | None = option(
        None,
        "The longest time, in seconds, without a sign of life of the server, or without a token from it.",
        null_means=300,
        # It says what it does once a second, and a busy machine may be late.
        ge=5,
    )
    num_generations: Int | None = option(
        None, "Completions sampled for each prompt: the group whose rewards are compared.", null_means=8, le=1024
    )
    num_generations_eval: Int | None = option(
        None, "Completions sampled for each prompt of an evaluation; `num_generations` when unset.", ge=1, le=1024
    )
    generation_batch_size: Int | None = option(
        None,
        "Prompts that a process has generated together, for one or more optimizer steps; by default those of one step.",
        ge=1,
    )
    max_completion_length: Int | None = option(None, "The most tokens a completion may have.", null_means=512, ge=1)
    beta: Float | None = option(
        None,
        "Weight of the KL penalty that keeps the policy near the reference model; 0 needs no reference.",
        null_means=0.0,
        ge=0.0,
    )
    num_iterations: Int | None = option(
        None, "Optimizer passes over the same completions (mu in the GRPO paper).", null_means=1, ge=1
    )
    epsilon: Float | None = option(
        None, "How far below 1 the probability ratio may fall before it is clipped.", null_means=0.2, gt=0.0
    )
    epsilon_high: Float | None = option(
        None, "How far above 1 the ratio may rise before it is clipped; `epsilon` when unset.", gt=0.0
    )
    delta: Float | None = option(
        None, "A second upper bound on the ratio, for two-sided clipping; should exceed 1 + epsilon.", gt=0.0
    )
    loss_type: Annotated[LossType, AsWord] | None = option(
        None, "How token losses are formed and averaged.", null_means="dapo"
    )
    scale_rewards: Annotated[Literal["group", "batch", "none"], BeforeValidator(_read_scale)] = option(
        "group",
        "Divide advantages by the spread of rewards within the group (true) or the batch, or leave them (none, false).",
    )
    mask_truncated_completions: Bool = option(False, "Leave completions that hit the length limit out of the loss.")
    sapo_temperature_neg: Float | None = option(
        None, "Softness of the SAPO gate for tokens with negative advantage.", null_means=1.05, gt=0.0
    )
    sapo_temperature_pos: Float | None = option(
        None, "Softness of the SAPO gate for tokens with positive advantage.", null_means=1.0, gt=0.0
    )
    vespo_k_pos: Float | None = option(
        None, "Power of the VESPO weight for positive advantages.", null_means=2.0, ge=0.0
    )
    vespo_lambda_pos: Float | None = option(
        None, "Decay of the VESPO weight for positive advantages.", null_means=3.0, ge=0.0
    )
    vespo_k_neg: Float | None = option(
        None, "Power of the VESPO weight for negative advantages.", null_means=3.0, ge=0.0
    )
    vespo_lambda_neg: Float | None = option(
        None, "Decay of the VESPO weight for negative advantages.", null_means=2.0, ge=0.0
    )
    top_entropy_quantile: Float | None = option(
        None, "Share of tokens, the most uncertain ones, that enter the policy loss.", null_means=1.0, ge=0.0, le=1.0
    )
    entropy_coef: Float | None = option(None, "Weight of an entropy bonus in the loss.", null_means=0.0, ge=0.0)

    reward_funcs: TextList | None = option(
        None, "Reward functions as import paths (`module.function`), or reward models of the hub."
    )
    reward_weights: Annotated[list[Float], BeforeValidator(_read_weights)] | None = option(
        None, "One weight for each reward function; 1 each when unset."
    )
    multi_objective_aggregation: Annotated[Literal["sum_then_normalize", "normalize_then_sum"], AsWord] | None = option(
        None,
        "Add up rewards and then normalise, or normalise each and then add up (GDPO).",
        null_means="sum_then_normalize",
    )
    rollout_func: Text | None = option(
        None, "Import path of a function that makes the completions itself, for environments with several turns."
    )

    temperature: Float | None = option(
        None, "Divides the logits before sampling; higher explores more.", null_means=1.0
    )
    top_p: Float | None = option(
        None, "Sample from the smallest set of tokens with this total probability.", null_means=1.0, gt=0.0, le=1.0
    )
    top_k: Int | None = option(None, "Sample from this many of the likeliest tokens; 0 means all.", null_means=0, ge=0)
    min_p: Float | None = option(
        None, "Drop tokens below this share of the likeliest token's probability.", ge=0.0, le=1.0
    )
    repetition_penalty: Float | None = option(
        None, "Above 1 it discourages tokens that already occurred; 1 is off.", null_means=1.0, gt=0.0
    )
    generation_kwargs: Free | None = option(None, "Further sampling settings of the engine, such as `stop_token_ids`.")
    chat_template_kwargs: Free | None = option(
        None, "Variables handed to the chat template, such as `enable_thinking: false`."
    )
    vllm_guided_decoding_regex: Text | None = option(
        None, "Completions must match this regular expression (write it in single quotes)."
    )

    use_data_producer: Bool = option(
        False, "Fetch rollouts through the data producer; the asynchronous options need it."
    )
    async_prefetch: Bool = option(False, "Generate the next rollouts in the background while the present ones train.")
    prefetch_depth: Int | None = option(
        None, "How many rollouts the background generation may be ahead.", null_means=1, ge=1
    )
    max_staleness: Int | None = option(
        None,
        "How many optimizer steps old a completion's policy may be; by default what depth and interval need.",
        ge=0,
    )
    vllm_sync_interval: Int | None = option(
        None, "Send the adapter to the server after every so many optimizer steps.", null_means=1, ge=1
    )
    vllm_lora_sync: Bool = option(
        False, "Send the LoRA adapter to the server as files in `vllm.sync_dir`; otherwise it gets all the weights."
    )
    weight_sync: Annotated[Literal["auto", "files", "nccl"], AsWord] = option(
        "auto",
        "How full weights get to the server: as files in `vllm.sync_dir`, over NCCL, or whichever of them is possible.",
    )
    sync_check_interval: Int = option(
        1,
        "Compare log-probs with the server's after every so many pushes; 0: never, the canary and confirmations stay.",
        ge=0,
    )
    streaming_partial_batch: Bool | None = option(
        None, "Score groups as they arrive instead of waiting for the whole batch.", null_means=False
    )
    streaming_min_groups: Int | None = option(
        None, "The fewest groups that are scored together when streaming.", null_means=1, ge=1
    )
    skip_zero_advantage_batches: Bool = option(
        True, "Spend no forward and backward pass on micro-batches whose advantages are all zero."
    )
    reward_num_workers: Int = option(1, "Processes that run the reward functions.", ge=0)
    vllm_enable_sleep_mode: Bool | None = option(
        None, "Move the engine's weights off the accelerator while it is idle (colocate mode).", null_means=False
    )

    vllm_importance_sampling_correction: Bool | None = option(
        None, "Weight the loss by how the training policy differs from the one that sampled.", null_means=True
    )
    importance_sampling_level: Annotated[Literal["token", "sequence"], AsWord] | None = option(
        None, "Whether the policy ratio in the loss is taken per token or per sequence.", null_means="token"
    )
    vllm_importance_sampling_mode: Annotated[ImportanceMode, AsWord] | None = option(
        None,
        "How sampling weights beyond the bounds are treated: cut or masked, per token or per sequence.",
        null_means="token_truncate",
    )
    vllm_importance_sampling_cap: Float | None = option(
        None, "The guide's name of `vllm_importance_sampling_clip_max`; either may be given.", gt=0.0
    )
    vllm_importance_sampling_clip_max: Float | None = option(
        None, "Upper bound of the sampling weights.", null_means=3.0, gt=0.0
    )
    vllm_importance_sampling_clip_min: Float | None = option(
        None, "Lower bound of the sampling weights; none when unset.", ge=0.0
    )
    off_policy_mask_threshold: Float | None = option(
        None, "Drop sequences with negative advantage whose divergence from the sampling policy exceeds this.", gt=0.0
    )
    use_bias_correction_kl: Bool | None = option(
        None,
        "Weight the KL penalty by the ratio of the present policy to the one that last scored it, not to the sampler.",
        null_means=True,
    )

    replay_buffer_size: Int = option(
        0, "How many groups with a learning signal are kept to stand in for groups without one; 0 is off.", ge=0
    )
    replay_recompute_logps: Bool = option(True, "Recompute log-probs of replayed groups under the present policy.")
    replay_max_age: Int = option(
        16, "How many optimizer steps after a group was first scored it may still be replayed.", ge=1
    )
    reroll_start_fraction: Float = option(
        1.0, "Try failed prompts again after this share of the training; 1.0 is off.", ge=0.0, le=1.0
    )
    reroll_max_groups: Int = option(1, "The most groups of a batch that are prompts tried again.", ge=1)
    reroll_threshold: Float = option(
        0.0, "A prompt failed when the weighted rewards of all its completions are at most this."
    )

    sync_ref_model: Bool = option(
        False, "Let the reference model follow the policy (full fine-tuning with `beta` above 0)."
    )
    ref_model_mixup_alpha: Float = option(
        0.9, "Weight of the policy in each update of the reference model.", ge=0.0, le=1.0
    )
    ref_model_sync_steps: Int = option(64, "Optimizer steps between updates of the reference model.", ge=1)

    disable_dropout: Bool = option(False, "Switch all dropout of the model off.")
    log_completions: Bool = option(False, "Log sample completions with their rewards.")
    num_completions_to_print: Int | None = option(
        None, "How many of the logged completions are printed; all when unset.", ge=0
    )
    use_liger_loss: Bool | None = option(None, "Use the fused Liger kernel in the model's head.", null_means=False)
