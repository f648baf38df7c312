"""Top-level options about training on several processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from axolotl.utils.schemas.base import Options, option
from axolotl.utils.schemas.scalars import Bool, Free, Int, Text, TextOrList, read_mapping, read_text


def _text_or_mapping(value: object) -> object:
    return read_mapping(value) if isinstance(value, dict) else read_text(value)


class DistributedOptions(Options):
    fsdp: TextOrList | None = option(None, "Shard the model over processes with FSDP: its modes.")
    fsdp_config: Free | None = option(None, "Settings of FSDP.")
    deepspeed: Annotated[str | dict[str, object], BeforeValidator(_text_or_mapping)] | None = option(
        None, "DeepSpeed settings: a JSON file or a mapping."
    )
    ddp_backend: Text | None = option(None, "How processes talk to each other: `nccl` or `gloo`.")
    ddp_find_unused_parameters: Bool | None = option(None, "Let DDP look for parameters without a gradient.")
    ddp_timeout: Int | None = option(None, "Seconds a process waits for the others.", ge=1)
