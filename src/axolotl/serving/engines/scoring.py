"""Log-probs of given tokens, by plain forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from axolotl.serving.engines.inference import DecodingCancelled, inference
from axolotl.serving.engines.sampling import log_probs_of
from axolotl.serving.engines.work import Work


def score(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    temperature: float,
    *,
    max_logit_rows: int = 1_024,
    is_cancelled: Callable[[], bool] = lambda: False,
    work: Work | None = None,
) -> list[list[float]]:
    """Log-probs of `tokens[i]` after `prompts[i]`, one a token, of the temperature-scaled distribution.

    Temperature 0 scores at temperature 1, as `decode` does. Rows are forwarded one by one, and logits are made for at
    most `max_logit_rows` positions at once. `is_cancelled` is asked before each forward pass; true raises
    `DecodingCancelled`.
    """
    work = work if work is not None else Work()
    results: list[list[float]] = []
    with inference(model):
        for prompt, completion in zip(prompts, tokens, strict=True):
            if not completion:
                results.append([])
                continue
            ids = torch.tensor([[*prompt, *completion]], device=model.device)
            values: list[float] = []
            for start in range(len(prompt) - 1, ids.shape[1] - 1, max_logit_rows):
                if is_cancelled():
                    raise DecodingCancelled
                stop = min(start + max_logit_rows, ids.shape[1] - 1)
                visible = ids[:, :stop]
                logits = model(input_ids=visible, use_cache=False, logits_to_keep=stop - start).logits[0].float()
                logits = logits / (temperature or 1.0)
                values += log_probs_of(logits, ids[0, start + 1 : stop + 1]).tolist()
                work.read(stop)
            results.append(values)
    return results
