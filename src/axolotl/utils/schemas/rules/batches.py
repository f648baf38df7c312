"""Groups, steps and rollouts: which numbers go together."""

from __future__ import annotations

import math

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.nodes import Problem


def groups_have_two(config: AxolotlConfig) -> list[Problem]:
    """A completion is judged against the others of its group."""
    group = config.trl.num_generations
    if group is None or group >= 2:
        return []
    message = f"is {group}; GRPO compares completions of the same prompt and needs at least 2"
    return [Problem(("trl", "num_generations"), message)]


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
