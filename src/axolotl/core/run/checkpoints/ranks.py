"""Several processes that write one checkpoint: they go on together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from axolotl.errors import PeerError


@dataclass(frozen=True)
class Ranks:
    """is_main: whether this process writes what all share. total: the sum of one number over all processes."""

    is_main: bool = True
    total: Callable[[float], float] = float

    def together(self, action: Callable[[], None]) -> None:
        """Run `action` here, wait for the others, and fail where any of them did.

        Raises:
            PeerError: another process failed and this one did not.
        """
        problem: Exception | None = None
        try:
            action()
        except Exception as error:
            problem = error
        num_failed = self.total(0.0 if problem is None else 1.0)
        if problem is not None:
            raise problem
        if num_failed:
            raise PeerError(
                "another process could not write its part of a checkpoint",
                why="its own report says what stopped it",
                do="read that report; older checkpoints are intact",
            )

    def alone(self, action: Callable[[], None]) -> None:
        """The same for what only the main process does."""
        self.together(action if self.is_main else lambda: None)
