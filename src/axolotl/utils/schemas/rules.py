"""What no single option can know: rules about several of them, checked before anything heavy is loaded.

A rule is a function from the config to a list of problems. The loader runs `AS_WRITTEN` on the config before empty
values are resolved, `COMMON` on the resolved one, and `TRAINING` on top of that unless only a server is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from axolotl.utils.schemas.adapter import INITS_OF_BASE
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.hosts import is_this_machine
from axolotl.utils.schemas.nodes import Path, Problem
from axolotl.utils.schemas.paths import paths_can_exist
from axolotl.utils.schemas.plan import prompt_limit, staleness, steps_per_rollout, uses_server

_WITHOUT_ARGUMENTS = frozenset(
    {"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor"}
)

Rule = Callable[[AxolotlConfig], list[Problem]]

MAX_SERVED_RANK = 512
MAX_SERVED_GROUP = 256


def one_address(config: AxolotlConfig) -> list[Problem]:
    """Server and client may be given one address each, but it has to be the same."""
    trl, vllm = config.trl, config.vllm
    problems = []
    if trl.vllm_server_port and vllm.port and trl.vllm_server_port != vllm.port:
        message = f"is {trl.vllm_server_port}, but vllm.port is {vllm.port}; remove one, or make them equal"
        problems.append(Problem(("trl", "vllm_server_port"), message))
    if trl.vllm_server_host and vllm.host and not _same_host(trl.vllm_server_host, vllm.host):
        message = f"is {trl.vllm_server_host}, but vllm.host is {vllm.host}; remove one, or make them equal"
        problems.append(Problem(("trl", "vllm_server_host"), message))
    return problems


def _same_host(one: str, other: str) -> bool:
    return one.lower() == other.lower() or (is_this_machine(one) and is_this_machine(other))


def one_cap(config: AxolotlConfig) -> list[Problem]:
    """The cap has two names."""
    cap, clip_max = config.trl.vllm_importance_sampling_cap, config.trl.vllm_importance_sampling_clip_max
    if cap is None or clip_max is None or cap == clip_max:
        return []
    message = f"is {cap}, but vllm_importance_sampling_clip_max, the same thing, is {clip_max}; keep one of them"
    return [Problem(("trl", "vllm_importance_sampling_cap"), message)]


def one_attention(config: AxolotlConfig) -> list[Problem]:
    """At most one way of choosing the attention kernel."""
    switches = ("flash_attention", "sdp_attention", "eager_attention")
    chosen = [name for name in switches if getattr(config, name)]
    if config.attn_implementation is not None:
        chosen.append("attn_implementation")
    if len(chosen) < 2:
        return []
    return [Problem((chosen[-1],), f"cannot be combined with {', '.join(chosen[:-1])}; keep one of them")]


def one_number_format(config: AxolotlConfig) -> list[Problem]:
    if config.bf16 is True and config.fp16:
        return [Problem(("fp16",), "cannot be combined with bf16: true; keep one of them")]
    return []


def optimizer_reads_its_arguments(config: AxolotlConfig) -> list[Problem]:
    """PyTorch's AdamW and Adafactor are set by options of their own; transformers reads no further ones for them."""
    if not config.optim_args or config.optimizer not in _WITHOUT_ARGUMENTS:
        return []
    message = f"is not read by optimizer {config.optimizer}; use adam_beta1, adam_beta2, adam_epsilon and weight_decay"
    return [Problem(("optim_args",), message)]


def one_schedule(config: AxolotlConfig) -> list[Problem]:
    """Intervals and warmups can be given in two ways each; 0 times an epoch means the other way."""
    problems = []
    for times, steps in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
        if getattr(config, times) and getattr(config, steps) is not None:
            problems.append(Problem((times,), f"cannot be combined with {steps}; keep one of them"))
    if config.warmup_steps is not None and config.warmup_ratio is not None:
        problems.append(Problem(("warmup_ratio",), "cannot be combined with warmup_steps; keep one of them"))
    return problems


def evaluation_drives_what_needs_it(config: AxolotlConfig) -> list[Problem]:
    """The best checkpoint, and a learning rate that follows a metric, need an evaluation."""
    needs: list[Path] = []
    if config.load_best_model_at_end:
        needs.append(("load_best_model_at_end",))
    if config.save_strategy == "best":
        needs.append(("save_strategy",))
    if config.lr_scheduler in ("reduce_lr_on_plateau", "greedy"):
        needs.append(("lr_scheduler",))
    if not config.val_set_size or config.eval_strategy == "no":
        return [Problem(path, "needs an evaluation; set val_set_size, and no eval_strategy: no") for path in needs]
    if config.save_strategy == "best" and config.metric_for_best_model is None:
        return [Problem(("save_strategy",), "is best; set metric_for_best_model, such as eval_reward")]
    return []


def best_model_is_saved(config: AxolotlConfig) -> list[Problem]:
    """The best checkpoint can only be loaded where every saving comes with an evaluation."""
    if not config.load_best_model_at_end or not config.val_set_size or config.save_strategy == "best":
        return []
    saves = _rhythm(config.save_strategy, config.save_steps, config.saves_per_epoch)
    evals = _rhythm(config.eval_strategy, config.eval_steps, config.evals_per_epoch)
    path: Path = ("load_best_model_at_end",)
    if saves[0] != evals[0]:
        return [Problem(path, f"needs saving and evaluation in the same rhythm, not {saves[0]} and {evals[0]}")]
    if saves[0] == "steps" and not round(saves[1] / evals[1], 6).is_integer():
        return [Problem(path, f"needs save_steps {saves[1]:g} to be a multiple of eval_steps {evals[1]:g}")]
    if saves[0] == "times per epoch" and saves[1] != evals[1]:
        return [Problem(path, f"needs saves_per_epoch {saves[1]:g} and evals_per_epoch {evals[1]:g} to be equal")]
    return []


def _rhythm(strategy: str | None, steps: float | None, times_per_epoch: int | None) -> tuple[str, float]:
    """How saving or evaluation is paced, and its number."""
    if steps is not None:
        return strategy or "steps", steps
    if times_per_epoch:
        return "times per epoch", times_per_epoch
    return strategy or "epoch", 1


def one_quantization(config: AxolotlConfig) -> list[Problem]:
    """A quantised base is frozen, so it needs an adapter; and it is in 4 bits or in 8."""
    problems = []
    if config.load_in_4bit and config.load_in_8bit:
        problems.append(Problem(("load_in_8bit",), "cannot be combined with load_in_4bit; keep one of them"))
    if config.adapter == "qlora" and config.load_in_8bit:
        problems.append(Problem(("load_in_8bit",), "cannot be combined with adapter: qlora, which is 4-bit"))
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, name) and config.adapter is None:
            message = "needs an adapter, since quantised weights cannot be trained; set adapter"
            problems.append(Problem((name,), message))
    return problems


def prompts_have_room(config: AxolotlConfig) -> list[Problem]:
    """The limit on prompts is at least one token."""
    if prompt_limit(config) >= 1:
        return []
    max_len, length = config.vllm.max_model_len, config.trl.max_completion_length
    message = (
        f"leaves no room for a prompt: vllm.max_model_len {max_len} - max_completion_length {length} "
        f"= {prompt_limit(config)} tokens; raise one or lower the other"
    )
    return [Problem(("trl", "max_completion_length"), message)]


def managed_server_is_here(config: AxolotlConfig) -> list[Problem]:
    """A server that `train` starts runs on this machine."""
    host = config.trl.vllm_server_host
    if not config.vllm.managed or host is None or is_this_machine(host):
        return []
    return [Problem(("vllm", "managed"), f"starts a server on this machine, but trl.vllm_server_host is {host}")]


def server_can_load_the_adapter(config: AxolotlConfig) -> list[Problem]:
    """What vLLM's adapters cannot express is refused before a run learns something that is never served."""
    if not config.trl.vllm_lora_sync:
        return []
    because = "cannot be combined with trl.vllm_lora_sync: true"
    instead = "; set it to false, and the server gets all the weights"
    problems = []

    def refuse(key: str, reason: str) -> None:
        problems.append(Problem((key,), f"{because} ({reason}){instead}", code="E-CFG-22"))

    if config.adapter is None:
        message = "needs an adapter to send; set adapter: lora"
        problems.append(Problem(("trl", "vllm_lora_sync"), message))
    if config.peft_use_dora:
        refuse("peft_use_dora", "the server cannot serve DoRA")
    if config.lora_bias != "none":
        refuse("lora_bias", "the server cannot serve trained biases")
    if config.lora_modules_to_save:
        refuse("lora_modules_to_save", "the server gets the adapter only")
    if "embed_tokens" in _target_names(config):
        refuse("lora_target_modules", "the server cannot adapt embed_tokens")
    if _changes_base(config):
        refuse(
            "peft_init_lora_weights", f"{config.peft_init_lora_weights} changes the base model, which the server has"
        )
    if config.lora_r > MAX_SERVED_RANK:
        message = f"is {config.lora_r}; the server takes ranks up to {MAX_SERVED_RANK}"
        problems.append(Problem(("lora_r",), message, code="E-CFG-21"))
    return problems


def server_can_take_all_weights(config: AxolotlConfig) -> list[Problem]:
    """Without adapter sync the server gets the weights under the base model's own names and shapes."""
    if not uses_server(config) or config.trl.vllm_lora_sync:
        return []
    quantised = {"adapter": config.adapter == "qlora"}
    quantised |= {name: bool(getattr(config, name)) for name in ("load_in_4bit", "load_in_8bit")}
    message = "makes weights that a server cannot take as they are; set trl.vllm_lora_sync: true"
    return [Problem((name,), message) for name, is_set in quantised.items() if is_set]


def server_can_receive_over_nccl(config: AxolotlConfig) -> list[Problem]:
    """NCCL carries all the weights, from GPU to GPU, to vLLM. What only the machine knows is checked when they meet."""
    if config.trl.weight_sync != "nccl":
        return []
    path: Path = ("trl", "weight_sync")
    problems = []
    if config.trl.vllm_lora_sync:
        message = "is nccl, which carries all the weights, but trl.vllm_lora_sync: true sends the adapter as files"
        problems.append(Problem(path, f"{message}; set weight_sync: files, or vllm_lora_sync: false"))
    if config.vllm.engine == "transformers":
        message = "is nccl, which vllm.engine: transformers cannot receive; set weight_sync: files, or another engine"
        problems.append(Problem(path, message))
    if config.vllm.device == "cpu":
        problems.append(Problem(path, "is nccl, which needs a GPU, but vllm.device is cpu; set weight_sync: files"))
    return problems


def reference_is_the_base_model(config: AxolotlConfig) -> list[Problem]:
    """With an adapter the reference policy is the model without it, which must be the base model still."""
    if not config.trl.beta or config.adapter is None:
        return []
    changed = {"lora_bias": config.lora_bias != "none", "peft_init_lora_weights": _changes_base(config)}
    message = "changes the base model itself, which trl.beta above 0 needs as the reference; remove one of them"
    return [Problem((name,), message) for name, is_set in changed.items() if is_set]


def _changes_base(config: AxolotlConfig) -> bool:
    init = config.peft_init_lora_weights
    return isinstance(init, str) and init.startswith(INITS_OF_BASE)


def head_has_no_adapter(config: AxolotlConfig) -> list[Problem]:
    """TRL multiplies by the head's plain weight, so that an adapter on it would never be trained."""
    if "lm_head" not in _target_names(config):
        return []
    return [Problem(("lora_target_modules",), "cannot hold lm_head, whose adapter would never be trained; remove it")]


def _target_names(config: AxolotlConfig) -> list[str]:
    targets = config.lora_target_modules
    names = [targets] if isinstance(targets, str) else targets or []
    return [name.rsplit(".", 1)[-1] for name in names]


def training_needs_data_and_rewards(config: AxolotlConfig) -> list[Problem]:
    problems = []
    if not config.datasets:
        problems.append(Problem(("datasets",), "is required: list at least one data set with its path"))
    if not config.trl.reward_funcs and not config.plugins:
        message = "is required: list at least one reward function, such as rewards.accuracy_reward"
        problems.append(Problem(("trl", "reward_funcs"), message))
    return problems


def no_plugins(config: AxolotlConfig) -> list[Problem]:
    if not config.plugins:
        return []
    return [Problem(("plugins",), f"are not supported; remove {', '.join(config.plugins)}")]


def groups_have_two(config: AxolotlConfig) -> list[Problem]:
    """A completion is judged against the others of its group."""
    group = config.trl.num_generations
    if group is None or group >= 2:
        return []
    message = f"is {group}; GRPO compares completions of the same prompt and needs at least 2"
    return [Problem(("trl", "num_generations"), message)]


def server_takes_the_group(config: AxolotlConfig) -> list[Problem]:
    """A server generates a group in one request, up to a limit."""
    group = config.trl.num_generations
    if not uses_server(config) or group is None or group <= MAX_SERVED_GROUP:
        return []
    return [Problem(("trl", "num_generations"), f"is {group}; the server takes groups of up to {MAX_SERVED_GROUP}")]


def steps_hold_whole_groups(config: AxolotlConfig) -> list[Problem]:
    """On every process, one optimizer step holds whole groups."""
    micro, steps, group = config.micro_batch_size, config.gradient_accumulation_steps, config.trl.num_generations
    if group is None or group < 2 or micro * steps % group == 0:
        return []
    message = (
        f"micro_batch_size {micro} x gradient_accumulation_steps {steps} = {micro * steps} completions, "
        f"not a multiple of trl.num_generations {group} (every process trains on whole groups). "
        f"Nearest valid: {', or '.join(_valid_settings(micro, steps, group))}"
    )
    return [Problem(("micro_batch_size",), message)]


def _valid_settings(micro: int, steps: int, group: int) -> list[str]:
    """The nearest settings that work, changing one option at a time."""
    choices = [
        ("gradient_accumulation_steps", _neighbours(steps, group // math.gcd(micro, group))),
        ("micro_batch_size", _neighbours(micro, group // math.gcd(steps, group))),
        ("num_generations", _divisors_near(micro * steps, group)),
    ]
    return [f"{name} {' or '.join(map(str, values))}" for name, values in choices if values]


def _neighbours(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [below, below + unit] if below else [unit]


def _divisors_near(number: int, wanted: int) -> list[int]:
    divisors = [divisor for divisor in range(2, number + 1) if number % divisor == 0]
    below = [divisor for divisor in divisors if divisor < wanted][-1:]
    return below + [divisor for divisor in divisors if divisor > wanted][:1]


def rollouts_hold_whole_steps(config: AxolotlConfig) -> list[Problem]:
    """What is generated together feeds a whole number of optimizer steps, on every process."""
    prompts, group = config.trl.generation_batch_size, config.trl.num_generations
    if prompts is None or group is None or groups_have_two(config) or steps_hold_whole_groups(config):
        return []
    per_step = config.micro_batch_size * config.gradient_accumulation_steps // group
    if prompts % per_step == 0:
        return []
    message = (
        f"is {prompts}, not a multiple of the {per_step} prompts that one optimizer step trains on (micro_batch_size "
        f"{config.micro_batch_size} x gradient_accumulation_steps {config.gradient_accumulation_steps} / "
        f"num_generations {group}). Nearest valid: {' or '.join(map(str, _neighbours(prompts, per_step)))}"
    )
    return [Problem(("trl", "generation_batch_size"), message)]


def replay_reaches_the_next_rollout(config: AxolotlConfig) -> list[Problem]:
    """A group is drawn when a rollout begins; one that is too old by then would be kept for nothing."""
    steps, age = steps_per_rollout(config), config.trl.replay_max_age
    if not config.trl.replay_buffer_size or age >= steps:
        return []
    message = (
        f"is {age}, but a rollout is trained for {steps} optimizer steps (num_iterations, generation_batch_size), so "
        f"that no group would ever be replayed; set at least {steps}"
    )
    return [Problem(("trl", "replay_max_age"), message)]


def sampling_explores(config: AxolotlConfig) -> list[Problem]:
    """Greedy completions of a prompt are all the same, so nothing could be learnt from their differences."""
    temperature = config.trl.temperature
    if temperature is None or temperature > 0:
        return []
    message = f"is {temperature:g}; training needs completions that differ, so a temperature above 0"
    return [Problem(("trl", "temperature"), message)]


def weights_match_rewards(config: AxolotlConfig) -> list[Problem]:
    functions, weights = config.trl.reward_funcs, config.trl.reward_weights
    if functions is None or weights is None or len(functions) == len(weights):
        return []
    message = f"has {len(weights)} weights for {len(functions)} reward functions; give one weight a function"
    return [Problem(("trl", "reward_weights"), message)]


def asynchronous_options_have_a_producer(config: AxolotlConfig) -> list[Problem]:
    trl = config.trl
    if trl.use_data_producer:
        return []
    used = {
        "async_prefetch": trl.async_prefetch,
        "prefetch_depth": (trl.prefetch_depth or 1) != 1,
        "streaming_partial_batch": bool(trl.streaming_partial_batch),
        "streaming_min_groups": (trl.streaming_min_groups or 1) != 1,
    }
    message = "needs trl.use_data_producer: true"
    return [Problem(("trl", name), message) for name, is_used in used.items() if is_used]


def prefetching_has_a_server(config: AxolotlConfig) -> list[Problem]:
    """Completions are made in the background over HTTP only: a thread that used the model would race with training."""
    if not (config.trl.async_prefetch and config.trl.use_data_producer) or uses_server(config):
        return []
    message = "needs trl.use_vllm: true with vllm_mode: server; in this process generation and training take turns"
    return [Problem(("trl", "async_prefetch"), message)]


def staleness_is_possible(config: AxolotlConfig) -> list[Problem]:
    limit, needed = config.trl.max_staleness, staleness(config)
    if limit is None or needed <= limit:
        return []
    message = (
        f"is {limit}, but completions are up to {needed} optimizer steps old with this {_what_ages(config)}; lower "
        f"them, or set max_staleness: {needed}"
    )
    return [Problem(("trl", "max_staleness"), message)]


def _what_ages(config: AxolotlConfig) -> str:
    """The options that completions grow old by."""
    trl = config.trl
    names = ["prefetch_depth", "vllm_sync_interval"] if uses_server(config) else []
    names += [
        name
        for name, value in (
            ("num_iterations", trl.num_iterations),
            ("generation_batch_size", trl.generation_batch_size),
        )
        if value and value > 1 and steps_per_rollout(config) > 1
    ]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


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


def gdpo_normalises_first(config: AxolotlConfig) -> list[Problem]:
    if config.rl != "gdpo" or config.trl.multi_objective_aggregation != "sum_then_normalize":
        return []
    message = "is sum_then_normalize, but rl: gdpo means normalize_then_sum; remove it, or set rl: grpo"
    return [Problem(("trl", "multi_objective_aggregation"), message)]


AS_WRITTEN: tuple[Rule, ...] = (one_address, one_cap)
COMMON: tuple[Rule, ...] = (
    paths_can_exist,
    one_quantization,
    prompts_have_room,
    managed_server_is_here,
    server_can_load_the_adapter,
    server_can_take_all_weights,
    server_can_receive_over_nccl,
    head_has_no_adapter,
    no_plugins,
)
TRAINING: tuple[Rule, ...] = (
    training_needs_data_and_rewards,
    one_attention,
    one_number_format,
    optimizer_reads_its_arguments,
    one_schedule,
    evaluation_drives_what_needs_it,
    best_model_is_saved,
    groups_have_two,
    server_takes_the_group,
    steps_hold_whole_groups,
    rollouts_hold_whole_steps,
    sampling_explores,
    weights_match_rewards,
    asynchronous_options_have_a_producer,
    prefetching_has_a_server,
    staleness_is_possible,
    replay_reaches_the_next_rollout,
    vespo_has_token_weights,
    clip_range_is_open,
    reference_can_follow,
    reference_is_the_base_model,
    gdpo_normalises_first,
)
