"""One weight sync for several ranks: the first rank pushes, and none goes on before the push is confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from axolotl.core.trainers.grpo.distributed import World
from axolotl.core.trainers.grpo.protocols import WeightSync


class SharedSync:
    """A `WeightSync` around that of the main process. Collective: raises on all ranks or on none.

    Args:
        inner: of the main process; None on the others.
        keeps_versions: as of `inner`, known on every rank.
    """

    def __init__(self, world: World, inner: WeightSync | None, *, keeps_versions: bool) -> None:
        assert (inner is not None) == world.is_main
        self.keeps_versions = keeps_versions
        self._world = world
        self._inner = inner
        self._version = 0
        # The last version that was settled.
        self._believed = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def metrics(self) -> Mapping[str, float]:
        return {} if self._inner is None else self._inner.metrics

    def push(self, version: int) -> None:
        self.begin(version)
        self.settle()

    def begin(self, version: int) -> None:
        self._on_main(lambda sync: sync.begin(version))
        self._version = version

    def settle(self) -> None:
        try:
            self._on_main(lambda sync: sync.settle())
        except BaseException:
            self._version = self._believed
            raise
        self._believed = self._version

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _on_main(self, action: Callable[[WeightSync], None]) -> None:
        def act() -> None:
            assert self._inner is not None
            action(self._inner)

        self._world.alone(act)
