"""`axolotl check`: what a config comes to, without loading anything."""

from __future__ import annotations

from collections.abc import Sequence

from axolotl.cli.config import LoadedConfig
from axolotl.errors import ConfigError
from axolotl.utils.schemas.availability import not_available
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import batch_plan, prompt_limit, server_url, sync_dir, uses_server


def run(loaded: LoadedConfig) -> None:
    """Prints the summary.

    Raises:
        ConfigError: `train` would refuse a value that is not available yet.
    """
    refused = not_available(loaded.config, "train")
    for line in (*(f"warning: {line}" for line in loaded.warnings), *summary(loaded.config)):
        print(line)
    refuse(refused, str(loaded.path))
    print(f"{loaded.path}: ok")


def refuse(lines: Sequence[str], name: str) -> None:
    """Raises `ConfigError` when there are lines of `not_available`."""
    if lines:
        raise ConfigError(
            f"{name} is valid, but asks for something that is not available yet",
            code="E-CFG-10",
            why="listed above, one a line",
            do="change these values as the lines say",
            details=tuple(lines),
        )


def summary(config: AxolotlConfig) -> list[str]:
    """The numbers that follow from the config, one line each."""
    lines = [f"model    {config.base_model}, {_what_is_trained(config)}", f"batch    {_batch(config)}"]
    if config.trl.generation_batch_size is not None:
        lines.append(f"         {_generation_batch(config)}")
    if batch_plan(config).num_iterations > 1:
        lines.append(f"         {_iterations(config)}")
    lines.append(f"prompts  {_prompts(config)}")
    if uses_server(config):
        start = "started by train" if config.vllm.managed else "start it with axolotl vllm-serve"
        lines.append(f"server   {server_url(config)} ({start}); files in {sync_dir(config)}")
    else:
        lines.append("server   none: the training process generates")
    lines.append(f"held out {_held_out(config)}")
    lines.append(f"output   {config.output_dir}")
    return lines


def _what_is_trained(config: AxolotlConfig) -> str:
    if config.adapter is None:
        return "all weights"
    return f"{config.adapter} of rank {config.lora_r}"


def _batch(config: AxolotlConfig) -> str:
    plan = batch_plan(config)
    prompts = f"{plan.prompts_per_step} prompt{'s' if plan.prompts_per_step > 1 else ''}"
    return (
        f"micro_batch_size {plan.micro_batch_size} x gradient_accumulation_steps {plan.num_micro_batches} = "
        f"{plan.completions_per_step} completions a step = {prompts} x num_generations {plan.num_generations}"
    )


def _generation_batch(config: AxolotlConfig) -> str:
    """`generation_batch_size` counts prompts here and completions in TRL, which asks for whole micro-batches. The rules
    ask for whole steps, which is more."""
    prompts, group, micro = config.trl.generation_batch_size, config.trl.num_generations, config.micro_batch_size
    assert prompts is not None and group is not None
    completions, slices = prompts * group, batch_plan(config).slices_per_rollout
    return (
        f"generation_batch_size {prompts} prompt{'s' if prompts > 1 else ''} x num_generations {group} = "
        f"{completions} completions, a multiple of micro_batch_size {micro}, for {_steps(slices)}"
    )


def _iterations(config: AxolotlConfig) -> str:
    plan = batch_plan(config)
    return (
        f"num_iterations {plan.num_iterations} x {_steps(plan.slices_per_rollout)} = "
        f"{_steps(plan.steps_per_rollout)} between one generation and the next"
    )


def _steps(count: int) -> str:
    return f"{count} optimizer step{'s' if count > 1 else ''}"


def _prompts(config: AxolotlConfig) -> str:
    limit = f"at most {prompt_limit(config)} tokens: sequence_len {config.sequence_len}"
    if config.vllm.max_model_len is not None:
        length = config.trl.max_completion_length
        assert length is not None
        limit += (
            f"; vllm.max_model_len {config.vllm.max_model_len} - max_completion_length {length} = "
            f"{config.vllm.max_model_len - length}"
        )
    return f"{limit}; longer ones: {config.long_prompts}"


def _held_out(config: AxolotlConfig) -> str:
    size = config.val_set_size
    if not size:
        return "nothing, so no evaluation (val_set_size 0)"
    return f"{size:.0%} of the rows" if size < 1 else f"{size:.0f} rows"
