"""Configs for tests, with empty values resolved as `load_config` leaves them."""

from __future__ import annotations

from typing import Any

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.resolve import resolve


def resolved_config(**options: Any) -> AxolotlConfig:
    """`options` as in the YAML file; `base_model` and `rl` need not be named."""
    return resolve(AxolotlConfig(**{"base_model": "a-model", "rl": "grpo", **options}))
