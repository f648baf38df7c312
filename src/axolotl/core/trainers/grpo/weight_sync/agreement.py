"""Whether a server's log-probs can be those of the policy it was given: functions of a few numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

FULL_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.1
QUANTISED_TOLERANCE = 0.5

DISTINCT = 10.0
"""How many times the noise two policies must be apart before being nearer to the wrong one says anything. The noise is
known from few tokens, and a policy that is trained may have three times as much."""

STOOD_STILL = 0.1
"""A server that moved by less than this part of the trainer's change has not followed it. When the change is as large
as the noise, a server that does follow has no reason to stay that near to where it was, on all tokens at once."""


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
    """Why `served` is not `policy`, None when nothing speaks against it.

    All are `[scored]` log-probs of the same tokens.

    Args:
        others: what a server might compute with by mistake, by name. One that is not clearly another policy (`DISTINCT`
            times the noise away) proves nothing and is left out.
        noise: distance of two right sides, as measured.
    """
    gap = distance(served, policy)
    distinct = {name: logps for name, logps in others.items() if distance(policy, logps) > DISTINCT * noise}
    nearer = {name: away for name, logps in distinct.items() if (away := distance(served, logps)) < gap}
    nearest = min(nearer, key=nearer.__getitem__, default=None)
    if nearest is not None:
        return f"{gap:.3g} nats from the policy that was pushed, {nearer[nearest]:.3g} from {nearest}"
    # Written so that a NaN is an objection too.
    if not gap <= tolerance:
        return f"{gap:.3g} nats from the policy that was pushed, tolerance is {tolerance:g}"
    return None


def has_moved(policy: torch.Tensor, before: torch.Tensor, *, noise: float) -> bool:
    """Whether a right server must compute something else than before. Half precision hides a change below the noise,
    and a step may change nothing (a learning rate of 0)."""
    return distance(policy, before) > noise


def stands_still(
    served: torch.Tensor, served_before: torch.Tensor, policy: torch.Tensor, before: torch.Tensor, *, noise: float
) -> str | None:
    """Why a server has not followed the optimizer from `before` to `policy`, None when it has, or need not show it.

    Finds what `objection` cannot see yet, a policy that is only about the noise away: a server that stood still
    computes the very numbers that it did before.
    """
    change, served_change = distance(policy, before), distance(served, served_before)
    if has_moved(policy, before, noise=noise) and served_change <= STOOD_STILL * change:
        return f"the trainer's log-probs moved by {change:.3g} nats, the server's by {served_change:.3g}"
    return None
