"""Log-probs of a policy of the past, for replayed completions that are not to be scored again."""

from __future__ import annotations

import torch


def stored_policy_logps(policy_logps: torch.Tensor, stored_logps: torch.Tensor) -> torch.Tensor:
    """`[N, C]` old log-probs for the loss, detached: the stored ones where there are any, the present ones elsewhere.

    They are the numerator of the importance weight against the sampler and the denominator of the policy ratio. With
    p the present policy, s the stored and q the sampler, a fresh token has weight p/q and ratio 1; a replayed one has
    weight s/q, which the cap bounds, and ratio p/s, which `epsilon` clips. Scored again it would have p/q and 1.

    Args:
        policy_logps: `[N, C]` of the present policy.
        stored_logps: `[N, C]`, NaN where nothing is stored.
    """
    return torch.where(stored_logps.isnan(), policy_logps.detach(), stored_logps)
