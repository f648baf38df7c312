"""How an option is declared: once, with its type, bounds, meaning, and what an empty value stands for."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

REQUIRED: Any = ...


def option(default: Any, description: str, *, null_means: Any = None, **bounds: Any) -> Any:
    """Declares one option.

    Args:
        default: the schema's default; `REQUIRED` when there is none; a class makes a fresh one of it.
        description: one sentence; the configuration reference prints it.
        null_means: what an option with default null comes to after loading; `resolve` puts it in.
        bounds: `ge`, `gt`, `le`, `lt`, `min_length`.
    """
    extra = None if null_means is None else {"null_means": null_means}
    if isinstance(default, type):
        return Field(default_factory=default, description=description, json_schema_extra=extra, **bounds)
    return Field(default, description=description, json_schema_extra=extra, **bounds)


def null_means(model: type[BaseModel], name: str) -> Any:
    """What null comes to for this option, or None when null stays null."""
    extra = model.model_fields[name].json_schema_extra
    return extra["null_means"] if isinstance(extra, dict) and "null_means" in extra else None


class Options(BaseModel):
    """Base of every section: no unknown keys, immutable, and an empty value means the default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_default(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data
