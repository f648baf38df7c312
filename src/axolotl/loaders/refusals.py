"""What the training libraries refuse about a config, as an error of the config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from axolotl.errors import ConfigError


@contextmanager
def refused_by_libraries() -> Iterator[None]:
    """What TRL, PEFT or transformers refuse about a config while a trainer is built is the config's fault."""
    try:
        yield
    except (ValueError, TypeError, ImportError, NotImplementedError, re.error) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            "the training libraries refuse this config",
            code="E-CFG-12",
            why=lines[0],
            do="change the option that this names",
            details=tuple(lines[1:]),
        ) from error


def needs_own_code(error: Exception) -> bool:
    """Whether transformers refused a model because it consists of code in its own directory, which nobody trusted."""
    return "trust_remote_code" in str(error)


OWN_CODE_WHY = "the model is made of code in its own directory, and that is not run unless the config says so"
OWN_CODE_DO = "read that code, and set trust_remote_code: true if you trust it"
