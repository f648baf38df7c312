"""What follows from the config by arithmetic alone; all of it is known before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.hosts import client_address


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step of one process.

    micro_batch_size: completions in one forward. num_micro_batches: forwards in a step. completions_per_step:
    their product. prompts_per_step: whole groups of `num_generations` in it. slices_per_rollout: optimizer steps that
    one pass over the completions of one generation takes. num_iterations: passes.

    Example: micro_batch_size 2 and 4 micro-batches are 8 completions, which is one prompt of 8 generations.
    """

    num_generations: int
    micro_batch_size: int
    num_micro_batches: int
    completions_per_step: int
    prompts_per_step: int
    slices_per_rollout: int = 1
    num_iterations: int = 1

    @property
    def steps_per_rollout(self) -> int:
        return self.slices_per_rollout * self.num_iterations


def batch_plan(config: AxolotlConfig) -> BatchPlan:
    """The batch arithmetic of a resolved config that passed the rules."""
    group = config.trl.num_generations
    assert group is not None, "resolve() fills num_generations"
    completions = config.micro_batch_size * config.gradient_accumulation_steps
    assert completions % group == 0, (completions, group)
    return BatchPlan(
        num_generations=group,
        micro_batch_size=config.micro_batch_size,
        num_micro_batches=config.gradient_accumulation_steps,
        completions_per_step=completions,
        prompts_per_step=completions // group,
        slices_per_rollout=slices_per_rollout(config),
        num_iterations=config.trl.num_iterations or 1,
    )


def slices_per_rollout(config: AxolotlConfig) -> int:
    """Optimizer steps that one pass over the completions of one generation takes; rounded down where the rules refuse
    the config."""
    prompts, group = config.trl.generation_batch_size, config.trl.num_generations
    if prompts is None or group is None:
        return 1
    return max(1, prompts * group // (config.micro_batch_size * config.gradient_accumulation_steps))


def steps_per_rollout(config: AxolotlConfig) -> int:
    """Optimizer steps between one generation and the next."""
    return slices_per_rollout(config) * (config.trl.num_iterations or 1)


def prompt_limit(config: AxolotlConfig) -> int:
    """The most tokens a prompt may have: `sequence_len`, and room for the completion within `vllm.max_model_len`."""
    limit = config.sequence_len
    if config.vllm.max_model_len is not None:
        assert config.trl.max_completion_length is not None, "resolve() fills max_completion_length"
        limit = min(limit, config.vllm.max_model_len - config.trl.max_completion_length)
    return limit


def uses_server(config: AxolotlConfig) -> bool:
    """Whether completions come from a server over HTTP."""
    return config.trl.use_vllm and config.trl.vllm_mode == "server"


def staleness(config: AxolotlConfig) -> int:
    """The most optimizer steps between the policy that makes a completion and the one that is trained on it.

    The last step that trains on a rollout is `steps_per_rollout - 1` behind the first, which is behind by
    `prefetch_depth` rollouts, and by those for which the server was sent nothing: weights are sent when one begins.
    """
    trl, steps = config.trl, steps_per_rollout(config)
    assert trl.prefetch_depth is not None and trl.vllm_sync_interval is not None, "resolve() fills them"
    if not uses_server(config):
        return steps - 1
    depth = trl.prefetch_depth if trl.async_prefetch else 0
    not_sent = math.ceil(trl.vllm_sync_interval / steps) - 1
    return (depth + not_sent) * steps + steps - 1


def versions_alive(config: AxolotlConfig) -> int:
    """Adapter versions that a server has to hold at once: the one being loaded, and all that completions may still be
    ordered of."""
    assert config.trl.prefetch_depth is not None, "resolve() fills prefetch_depth"
    return (config.trl.prefetch_depth if config.trl.async_prefetch else 0) + 2


def server_url(config: AxolotlConfig) -> str:
    """Where the trainer finds the server."""
    assert config.trl.vllm_server_host is not None, "resolve() fills vllm_server_host"
    return f"http://{client_address(config.trl.vllm_server_host)}:{config.trl.vllm_server_port}"


def sync_dir(config: AxolotlConfig) -> Path:
    """The directory where trainer and server meet."""
    if config.vllm.sync_dir is not None:
        return Path(config.vllm.sync_dir).expanduser()
    assert config.trl.vllm_server_port is not None, "resolve() fills vllm_server_port"
    return default_sync_dir(config.trl.vllm_server_port)


def default_sync_dir(port: int) -> Path:
    """Where they meet when the config names no directory."""
    return Path.home() / ".cache" / "axolotl" / "servers" / str(port)
