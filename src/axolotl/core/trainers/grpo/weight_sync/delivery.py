"""How weights get to the server, whatever proves afterwards that they did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from axolotl.errors import NumericError, SyncError

ADAPTER = "default"
"""PEFT's name of the adapter that is trained."""


@dataclass(frozen=True)
class Delivered:
    """Seconds: save_s until the version was durable on disk (0 where none is written), load_s until it was served.

    digest: names its contents to the server.
    """

    save_s: float
    load_s: float
    digest: str = ""


class Delivery(Protocol):
    """Brings the present weights to the server under a number. Main thread.

    has_adapter: whether what is sent is an adapter over a base model that the server has already. Then several versions
    are alive, and the canary's files stay, so that it can be sent again from any thread.
    """

    has_adapter: bool

    def deliver(self, version: int) -> Delivered:
        """Returns when the server confirmed that it serves `version`; raises `SyncError` otherwise."""
        ...


def require_finite(tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """Raise `NumericError` `E-NUM-02` for weights that are not finite: they would generate noise for hours, and never
    leave the trainer."""
    broken = [name for name, value in tensors.items() if not _is_finite(value)]
    if broken:
        raise NumericError(
            f"policy version {version} is not finite and was not pushed: {broken[0]} and {len(broken) - 1} more",
            code="E-NUM-02",
            why="a training step produced NaN or infinity",
            do="lower learning_rate or max_grad_norm, and resume from the newest checkpoint",
        )


def _is_finite(value: torch.Tensor) -> bool:
    if not value.is_floating_point():
        return True
    # One pass without a temporary; a sum that overflows says nothing about its terms, and then each is looked at.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def check_reached(got: int, sent: int, what: str) -> None:
    """Raise `E-SYN-04` unless the server applied everything: it would generate with a part of the policy."""
    if got != sent:
        raise SyncError(
            f"{what} reached {got} of {sent} places in the server's model",
            code="E-SYN-04",
            why="the engine loaded it without a word about the rest",
            do="set lora_target_modules to modules that the engine can serve, or trl.vllm_lora_sync: false",
        )
