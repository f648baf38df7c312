"""From the value of `rl:` to a trainer: a table, one row a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from axolotl.core.trainers.grpo.assembly import Parts, assemble
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.errors import ConfigError

Recipe = Callable[[Parts], AxolotlGRPOTrainer]

# `gdpo` is GRPO whose `multi_objective_aggregation` is `normalize_then_sum`, which the config has settled by now.
RECIPES: Mapping[str, Recipe] = {"grpo": assemble, "gdpo": assemble}


class HFRLTrainerBuilder:
    """Builds the trainer that `rl:` names."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def build(self) -> AxolotlGRPOTrainer:
        """Raises `ConfigError` for a method without a recipe."""
        method = self._parts.config.rl
        recipe = RECIPES.get(method)
        if recipe is None:
            raise ConfigError(f"rl: {method} has no trainer", do=f"use one of {', '.join(RECIPES)}")
        return recipe(self._parts)
