"""When the generator gets new weights, and what the versions are called.

Version v is the policy after v - 1 optimizer steps; version 0 is the base model, which no rollout of a run uses.
"""

from __future__ import annotations


def version_of(step: int) -> int:
    """The version of the weights that exist before optimizer step `step` (counted from 0) is taken."""
    return step + 1


def is_due(step: int, served: int, interval: int, rollout: int = 1) -> bool:
    """Whether to push before `step`: always before the first of a run, then every `interval` steps, but only where a
    rollout begins.

    Args:
        rollout: optimizer steps that train on one rollout. In between nothing is ordered that new weights could make,
            so that a push which falls there waits for the next one.
    """
    if served == 0:
        return True
    if step % rollout:
        return False
    is_over = step // interval != (step - rollout) // interval
    return is_over and served != version_of(step)
