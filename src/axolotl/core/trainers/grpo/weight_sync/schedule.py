"""When the generator gets new weights, and what the versions are called.

Version v is the policy after v - 1 optimizer steps; version 0 is the base model, which no rollout of a run uses.
"""

from __future__ import annotations


def version_of(step: int) -> int:
    """The version of the weights that exist before optimizer step `step` (counted from 0) is taken."""
    return step + 1


def is_due(step: int, served: int, interval: int) -> bool:
    """Whether to push before the rollouts of `step`: always before the first of a run, then every `interval` steps."""
    if served == 0:
        return True
    return step % interval == 0 and served != version_of(step)
