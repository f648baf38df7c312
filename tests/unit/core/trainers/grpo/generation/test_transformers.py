"""Completions from the policy in process, with the log-probs that training needs."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from axolotl.core.trainers.grpo.generation.transformers import IN_PROCESS, TransformersBackend
from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow
from axolotl.serving.wire import Sampling
from tests.support.tiny_model import tiny_config

PROMPTS = [(5, 6, 7), (8, 9), (10,)]
ROWS = [PromptRow(index, "", ids, {}) for index, ids in enumerate(PROMPTS)]
SEEDS = [[1, 2], [3, 4], [5, 6]]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).train()


def generate(model: LlamaForCausalLM, *, prompts_per_batch: int = 8, **options: float) -> list[CompletionGroup]:
    backend = TransformersBackend(lambda: model, eos_token_ids=[2], pad_token_id=0, prompts_per_batch=prompts_per_batch)
    finished = list(backend.generate(ROWS, SEEDS, Sampling(n=2, max_tokens=9, **options), version=3))
    assert [place for place, _ in finished] == [0, 1, 2]
    return [group for _, group in finished]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.5}, {"top_k": 4, "min_p": 0.1}])
def test_log_probs_know_no_filter(model: LlamaForCausalLM, options: dict[str, float]) -> None:
    """They are what a forward of the trainer computes, whatever the filters cut."""
    for group in generate(model, **options):
        for completion in group.completions:
            prompt, ids = list(group.row.ids), list(completion.ids)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logps = (logits / options.get("temperature", 1.0)).log_softmax(-1)
            expected = logps.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_groups_come_in_order_whatever_the_batches(model: LlamaForCausalLM) -> None:
    together, apart = generate(model), generate(model, prompts_per_batch=2)
    assert [group.row for group in apart] == ROWS
    assert [[c.ids for c in group.completions] for group in apart] == [
        [c.ids for c in group.completions] for group in together
    ]


def test_completions_name_what_made_them(model: LlamaForCausalLM) -> None:
    for group in generate(model):
        for completion in group.completions:
            assert (completion.adapter_version, completion.instance_id) == (3, IN_PROCESS)
            assert completion.is_truncated == (len(completion.ids) == 9 and completion.ids[-1] != 2)
    assert model.training, "the mode of training is put back"
