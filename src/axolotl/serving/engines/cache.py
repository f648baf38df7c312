"""A key-value cache with room to grow, so that a decoding step writes one position and copies none."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer whose keys and values are views into buffers of `capacity` positions.

    Selecting rows leaves plain tensors; the next update moves them into fresh buffers.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._buffers = (self._with_room(self.keys, end), self._with_room(self.values, end))
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def _with_room(self, states: torch.Tensor, end: int) -> torch.Tensor:
        batch, heads, length, width = states.shape
        buffer = states.new_empty(batch, heads, max(self.capacity, end), width)
        buffer[:, :, :length] = states
        return buffer

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None


def growing_cache(model: PreTrainedModel, capacity: int) -> DynamicCache:
    """The cache this model's layers need, full-attention layers with room for `capacity` positions."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
