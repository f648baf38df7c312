"""What is sampled and scored, and how old it may get."""

from __future__ import annotations

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.nodes import Problem
from axolotl.utils.schemas.plan import staleness, steps_per_rollout, uses_server


def training_needs_data_and_rewards(config: AxolotlConfig) -> list[Problem]:
    problems = []
    if not config.datasets:
        problems.append(Problem(("datasets",), "is required: list at least one data set with its path"))
    if not config.trl.reward_funcs and not config.plugins:
        message = "is required: list at least one reward function, such as rewards.accuracy_reward"
        problems.append(Problem(("trl", "reward_funcs"), message))
    return problems


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


def gdpo_normalises_first(config: AxolotlConfig) -> list[Problem]:
    if config.rl != "gdpo" or config.trl.multi_objective_aggregation != "sum_then_normalize":
        return []
    message = "is sum_then_normalize, but rl: gdpo means normalize_then_sum; remove it, or set rl: grpo"
    return [Problem(("trl", "multi_objective_aggregation"), message)]


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
