"""What decoding and scoring share: the model's state during a call, and how a call is given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


class DecodingCancelled(Exception):
    """`is_cancelled` said so; nothing more of the request is kept."""


@contextmanager
def inference(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and no autograd, put back afterwards."""
    was_training = model.training
    model.train(False)
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
