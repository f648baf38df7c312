"""`axolotl config-schema`: the options as JSON schema, or as the tables of the configuration reference."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from axolotl.utils.schemas.adapter import AdapterOptions
from axolotl.utils.schemas.base import null_means
from axolotl.utils.schemas.checkpoints import CheckpointOptions
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.datasets import DataOptions, DatasetConfig
from axolotl.utils.schemas.distributed import DistributedOptions
from axolotl.utils.schemas.logging import LoggingOptions
from axolotl.utils.schemas.model import ModelOptions, SpecialTokens
from axolotl.utils.schemas.scalars import show
from axolotl.utils.schemas.training import TrainingOptions
from axolotl.utils.schemas.trl import TRLConfig
from axolotl.utils.schemas.vllm import VllmConfig

_OWN = [name for name in AxolotlConfig.model_fields if name in AxolotlConfig.__annotations__]

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("Model and tokenizer", ModelOptions),
    ("`special_tokens:`", SpecialTokens),
    ("Adapter", AdapterOptions),
    ("Data", DataOptions),
    ("Entries of `datasets:`", DatasetConfig),
    ("Training", TrainingOptions),
    ("`trl:`", TRLConfig),
    ("`vllm:`", VllmConfig),
    ("Checkpoints and evaluation", CheckpointOptions),
    ("Logging", LoggingOptions),
    ("Several processes", DistributedOptions),
)


def run(*, as_markdown: bool) -> None:
    """Prints the schema."""
    print(markdown() if as_markdown else json.dumps(AxolotlConfig.model_json_schema(), indent=2))


def markdown() -> str:
    """One table a section."""
    tables = [_table("Method", AxolotlConfig, _OWN)]
    tables += [_table(title, model, list(model.model_fields)) for title, model in SECTIONS]
    return "\n\n".join(tables)


def _table(title: str, model: type[BaseModel], names: list[str]) -> str:
    lines = [f"## {title}", "", "| Option | Type | Default | Description |", "|---|---|---|---|"]
    for name in names:
        field = model.model_fields[name]
        cells = (f"`{name}`", _type(field), _default(model, name), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _type(field: FieldInfo) -> str:
    return " or ".join(dict.fromkeys(_words(field.annotation)))


def _words(annotation: Any) -> Iterator[str]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _words(arguments[0])
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _words(argument)
    elif origin is typing.Literal:
        yield ", ".join(f"`{choice}`" for choice in arguments)
    elif origin is list:
        yield "list of " + " or ".join(_words(arguments[0]))
    elif origin is dict:
        yield "mapping"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "section"
    elif annotation is not type(None):
        yield "text" if annotation is str else annotation.__name__


def _default(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    value = null_means(model, name) if field.default is None else field.default
    if value is None or field.default_factory is not None:
        return "unset"
    return f"`{show(value) if not isinstance(value, str) else value}`"
