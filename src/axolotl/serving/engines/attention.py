"""Attention for decoding with grouped query heads, without copying the cache for each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "axolotl_grouped_sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA, but for one new token the query heads that share a key head become query positions of it.

    They all look at the same keys, so no causal order is lost, and the keys need not be repeated.

    Args:
        query: `[rows, heads, queries, width]`.
        key, value: `[rows, key heads, keys, width]`.
        attention_mask: broadcastable to `[rows, 1, queries, keys]`, or None.

    Returns:
        `[rows, queries, heads, width]`.
    """
    rows, heads, queries, width = query.shape
    key_heads = key.shape[1]
    if queries != 1 or heads == key_heads or kwargs.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    shared = query.reshape(rows, key_heads, heads // key_heads, width)
    mask = None if attention_mask is None else attention_mask.expand(-1, -1, heads // key_heads, -1)
    output = scaled_dot_product_attention(shared, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
