"""Whether a server's log-probs can be those of the policy it was given: functions of a few numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

FULL_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.1
QUANTISED_TOLERANCE = 0.5


def tolerance(*, is_half: bool, is_quantised: bool) -> float:
    """How far, in nats and on average over the tokens, two right sides may be apart.

    Args:
        is_half: either side computes in half precision.
        is_quantised: the trainer's base is in 4 or 8 bits and the server's is not: other numbers by design.
    """
    if is_quantised:
        return QUANTISED_TOLERANCE
    return HALF_TOLERANCE if is_half else FULL_TOLERANCE


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean absolute difference; NaN when either holds a NaN."""
    return (one - other).abs().mean().item()


def objection(
    served: torch.Tensor,
    policy: torch.Tensor,
    others: Mapping[str, torch.Tensor],
    *,
    tolerance: float,
    noise: float,
) -> str | None:
    """Why `served` is not `policy`, None when it is.

    All are `[scored]` log-probs of the same tokens.

    Args:
        others: what a server might compute with by mistake, by name. One that is not clearly another policy (ten times
            the noise away) proves nothing and is left out.
        noise: distance of two right sides, as measured.
    """
    gap = distance(served, policy)
    distinct = {name: logps for name, logps in others.items() if distance(policy, logps) > 10 * noise}
    nearer = {name: away for name, logps in distinct.items() if (away := distance(served, logps)) < gap}
    nearest = min(nearer, key=nearer.__getitem__, default=None)
    if nearest is not None:
        return f"{gap:.3g} nats from the policy that was pushed, {nearer[nearest]:.3g} from {nearest}"
    # Written so that a NaN is an objection too.
    if not gap <= tolerance:
        return f"{gap:.3g} nats from the policy that was pushed, tolerance is {tolerance:g}"
    return None
