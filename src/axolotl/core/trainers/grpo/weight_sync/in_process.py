"""Weight sync when the policy generates by itself: there is nothing to bring anywhere, only a version to name."""

from __future__ import annotations


class InProcessSync:
    """A `WeightSync` that is always up to date."""

    def __init__(self) -> None:
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def push(self, version: int) -> None:
        self._version = version

    def close(self) -> None:
        """Nothing is held."""
