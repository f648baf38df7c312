"""Several processes that write one checkpoint: they go on together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run, as far as checkpoints need them."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes what all share."""
        ...

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` here, wait for the others, and raise where any of them failed."""
        ...

    def alone(self, action: Callable[[], Any]) -> None:
        """The same for what only the main process does."""
        ...


class OneRank:
    """A run of one process."""

    is_main = True

    def together(self, action: Callable[[], T]) -> T:
        return action()

    def alone(self, action: Callable[[], Any]) -> None:
        action()
