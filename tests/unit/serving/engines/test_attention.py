"""Grouped decoding attention against transformers' own, on the same model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.integrations import sdpa_attention

from axolotl.serving.engines import attention
from axolotl.serving.engines.attention import GROUPED_SDPA
from axolotl.serving.engines.decoding import decode
from axolotl.serving.wire import Sampling
from tests.support.tiny_model import tiny_config

PROMPTS = [[5, 6, 7, 8], [9]]


def logprobs_under(name: str) -> list[list[float | None]]:
    torch.manual_seed(0)
    config = tiny_config(num_attention_heads=4, num_key_value_heads=2, attn_implementation=name)
    model = LlamaForCausalLM(config).eval()
    sampling = Sampling(n=2, max_tokens=8, extra={"ignore_eos": True})
    groups = decode(model, PROMPTS, sampling, [[1, 2], [3, 4]], eos_token_ids={2}, pad_token_id=0)
    return [completion.logprobs for group in groups for completion in group.completions]


def test_it_computes_what_sdpa_computes_without_repeating_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logprobs_under("sdpa")
    queries: list[int] = []

    def counting(module: torch.nn.Module, query: torch.Tensor, *args: object, **kwargs: object) -> object:
        queries.append(query.shape[2])
        return sdpa_attention.sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", counting)
    for got, wanted in zip(logprobs_under(GROUPED_SDPA), expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)
    assert queries == [4, 4], "only the prompt, once a layer, takes the path that repeats keys"
