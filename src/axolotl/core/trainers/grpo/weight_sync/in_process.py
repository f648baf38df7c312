"""Weight sync when the policy generates by itself: there is nothing to bring anywhere, only a version to name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from axolotl.errors import NumericError


class InProcessSync:
    """A `WeightSync` that is always up to date.

    policy: returns the model whose trained weights are looked at: noise in them would end in the sampler.
    """

    def __init__(self, policy: Callable[[], nn.Module]) -> None:
        self._policy = policy
        self._version = 0

    keeps_versions = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    def push(self, version: int) -> None:
        """Raises `NumericError` when a trained weight is not finite."""
        require_finite_weights(self._policy(), version - 1)
        self._version = version

    def begin(self, version: int) -> None:
        self.push(version)

    def settle(self) -> None:
        """Nothing is left to check."""

    def close(self) -> None:
        """Nothing is held."""


def require_finite_weights(policy: nn.Module, step: int) -> None:
    """Raise `NumericError` `E-NUM-02` when a trained weight is not finite after `step` optimizer steps."""
    for name, weight in policy.named_parameters():
        if weight.requires_grad and not bool(weight.isfinite().all()):
            raise NumericError(
                f"the weights are no longer finite after step {step}: {name}",
                code="E-NUM-02",
                why="the last optimizer step was too large",
                do="lower learning_rate or max_grad_norm, and resume from the newest checkpoint",
            )
