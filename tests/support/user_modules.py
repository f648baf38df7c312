"""Python files as a user would write them, imported for one test only."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_module(directory: Path, name: str, source: str) -> Path:
    """`name` may be `package.module`; packages get no `__init__.py`, as users leave them out too."""
    file = directory / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source).lstrip("\n"))
    return file


@contextmanager
def imports_undone() -> Iterator[None]:
    """Inside, modules may be imported and `sys.path` may change; afterwards both are as before."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is None or not file.startswith((sys.prefix, sys.base_prefix)):
                del sys.modules[name]
