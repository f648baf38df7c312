"""The whole config: every option of the YAML file, top-level keys as attributes."""

from __future__ import annotations

from typing import Annotated, Literal

from axolotl.utils.schemas.adapter import AdapterOptions
from axolotl.utils.schemas.base import REQUIRED, option
from axolotl.utils.schemas.checkpoints import CheckpointOptions
from axolotl.utils.schemas.datasets import DataOptions
from axolotl.utils.schemas.distributed import DistributedOptions
from axolotl.utils.schemas.logging import LoggingOptions
from axolotl.utils.schemas.model import ModelOptions
from axolotl.utils.schemas.scalars import AsWord, TextList
from axolotl.utils.schemas.training import TrainingOptions
from axolotl.utils.schemas.trl import TRLConfig
from axolotl.utils.schemas.vllm import VllmConfig


class AxolotlConfig(
    LoggingOptions,
    DistributedOptions,
    CheckpointOptions,
    TrainingOptions,
    DataOptions,
    AdapterOptions,
    ModelOptions,
):
    """What a YAML file says. `axolotl.cli.config.load_config` makes it, with empty values resolved."""

    rl: Annotated[Literal["grpo", "gdpo"], AsWord] = option(
        REQUIRED, "The method: `grpo`, or `gdpo`, which is GRPO with rewards normalised one by one."
    )
    trl: TRLConfig = option(TRLConfig, "Options of GRPO.")
    vllm: VllmConfig = option(VllmConfig, "Options of the generation server.")
    plugins: TextList | None = option(None, "Import paths of plugins.")
