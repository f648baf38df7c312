"""Log-probs and entropies of given tokens from logits."""

from __future__ import annotations

import torch


def token_logps_and_entropies(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a policy with this temperature thinks of the tokens.

    Args:
        logits: `[N, C, V]`, position c predicting token c. tokens: `[N, C]`.

    Returns:
        `[N, C]` float32 log-probs, which carry the gradient, and `[N, C]` float32 entropies in nats, detached.
    """
    log_probs = (logits.float() / temperature).log_softmax(dim=-1)
    logps = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    return logps, entropies
