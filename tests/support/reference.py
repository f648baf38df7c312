"""Log-probs as transformers and PEFT compute them: the oracle for what a server answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_reference(model_directory: Path, adapter: Path | None = None) -> torch.nn.Module:
    """The float32 model, with the adapter laid over it by PEFT when there is one."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    if adapter is None:
        return model.eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter).eval()


@torch.no_grad()
def reference_logprobs(
    model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Log-prob of each of `tokens` after `prompt` and the tokens before it, from one plain forward."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
