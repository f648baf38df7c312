"""A reward function of the user and what its signature asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""The arguments that every reward function may take besides the data set's columns."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class RewardFunction:
    """path: as written in the config. name: its metric name, distinct among the functions of a run. file: where its
    module came from."""

    path: str
    name: str
    function: Callable[..., Any]
    file: str

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter] | None:
        """None when Python cannot tell, as for some compiled functions: they get every argument."""
        try:
            return inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return None

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the arguments it cannot be called without."""
        parameters = self.parameters or {}
        return tuple(
            name for name, p in parameters.items() if p.kind in _NAMED and p.default is inspect.Parameter.empty
        )

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `arguments` that the signature takes; all of them with `**kwargs`."""
        parameters = self.parameters
        if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return dict(arguments)
        return {name: value for name, value in arguments.items() if name in parameters}

    @property
    def place(self) -> str:
        """`rewards.py:14`, where it is defined, as far as Python knows."""
        function: Any = self.function
        while isinstance(function, partial):
            function = function.func
        if not inspect.isroutine(function):
            function = type(function).__call__
        code = getattr(inspect.unwrap(function), "__code__", None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else Path(self.file).name
