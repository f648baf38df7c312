"""Generation options on vLLM: the suite that every engine passes, and what only vLLM has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import Sampling
from tests.support.option_suite import OptionSuite
from tests.support.protocol_suite import Subject
from tests.support.reference import load_reference
from tests.support.running_engine import PROMPTS, RunningEngine, generate, one
from tests.support.tiny_model import make_tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def subject(vllm_subject: Subject) -> Subject:
    return vllm_subject


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> torch.nn.Module:
    return load_reference(tiny_model)


class TestVLLMOptions(OptionSuite):
    supports_regex = True
    reports_kept_mass = False


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"n": 2}, "set trl.num_generations instead"),
        ({"temperature": 0.5}, "set trl.temperature instead"),
        ({"max_tokens": 5}, "set trl.max_completion_length instead"),
        ({"seed": 1}, "generation_kwargs.seed: decided by the server"),
        ({"logprobs": 5}, "generation_kwargs.logprobs: decided by the server"),
        ({"extra_args": {"a": 1}}, "generation_kwargs.extra_args: decided by the server"),
        ({"_eos_token_id": 1}, "decided by the server"),
        ({"no_such_thing": 1}, "generation_kwargs.no_such_thing"),
        ({"min_tokens": "many"}, "generation_kwargs.min_tokens"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"logit_bias": {"word": 1.0}}, "generation_kwargs.logit_bias"),
        ({"presence_penalty": 5.0}, "presence_penalty"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
    ],
)
def test_generation_kwargs_that_cannot_be_served_are_refused_by_name(
    vllm_engine: RunningEngine, extra: dict[str, Any], reason: str
) -> None:
    """And by the check at the start of a run as well, which asks nothing of the engine."""
    with pytest.raises(EngineRejects, match=reason):
        generate(vllm_engine, PROMPTS[:1], [[1]], extra=extra)
    before = vllm_engine.engine.progress()
    with pytest.raises(EngineRejects, match=reason):
        vllm_engine.engine.check_sampling(Sampling(max_tokens=8, extra=extra))
    assert vllm_engine.engine.progress() == before


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.001},
        {"structured_regex": "([0-9"},
        {"extra": {"stop_token_ids": [384]}},
        {"extra": {"logit_bias": {"384": 1.0}}},
        {"extra": {"bad_words": [7]}},
        {"extra": {"stop": ["a", 3]}},
        {"extra": {"frequency_penalty": 3.0}},
        {"extra": {"thinking_token_budget": 4}},
        {"extra": {"repetition_detection": {"max_pattern_size": -1}}},
    ],
)
def test_the_check_refuses_what_generation_would(vllm_engine: RunningEngine, options: dict[str, Any]) -> None:
    with pytest.raises(EngineRejects) as refused:
        generate(vllm_engine, PROMPTS[:1], [[1]], **options)
    with pytest.raises(EngineRejects, match=re.escape(str(refused.value))):
        vllm_engine.engine.check_sampling(Sampling(max_tokens=8, **options))


def test_the_check_passes_what_is_served(vllm_engine: RunningEngine) -> None:
    vllm_engine.engine.check_sampling(
        Sampling(
            max_tokens=8,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            repetition_penalty=1.1,
            structured_regex="[0-9]+",
            extra={"stop": ["x"], "min_tokens": 2, "bad_words": ["the"], "presence_penalty": 0.5},
        )
    )


def test_generation_kwargs_reach_the_sampler(vllm_engine: RunningEngine) -> None:
    prompt = PROMPTS[:1]
    free = one(generate(vllm_engine, prompt, [[1]])).ids
    stopped = one(generate(vllm_engine, prompt, [[1]], extra={"stop_token_ids": [free[2]]}))
    assert stopped.ids == free[: free.index(free[2]) + 1]
    assert stopped.finish_reason == "stop"
    allowed = one(generate(vllm_engine, prompt, [[1]], extra={"allowed_token_ids": [50, 51]}))
    assert set(allowed.ids) <= {50, 51}
    assert sum(torch.tensor(allowed.logprobs).exp() > 0.999) < len(allowed.ids), "renormalised over two tokens"
    biased = one(generate(vllm_engine, prompt, [[1]], extra={"logit_bias": {"77": 100.0}}))
    assert set(biased.ids) == {77}


def test_filters_and_penalties_reach_the_sampler(vllm_engine: RunningEngine, base: torch.nn.Module) -> None:
    prompt = PROMPTS[0]
    top = one(generate(vllm_engine, [prompt], [[4]], top_k=2)).ids
    context = list(prompt)
    for token in top:
        best = base(input_ids=torch.tensor([context])).logits[0, -1].topk(2).indices.tolist()
        assert token in best
        context.append(token)
    greedy = one(generate(vllm_engine, [prompt], [[4]], temperature=0.0)).ids
    assert one(generate(vllm_engine, [prompt], [[4]], top_p=1e-6)).ids == greedy
    assert one(generate(vllm_engine, [prompt], [[4]], min_p=1.0)).ids == greedy
    repeated = [greedy[0]] * 20
    plain = one(generate(vllm_engine, [repeated], [[4]], temperature=0.0)).ids
    assert one(generate(vllm_engine, [repeated], [[4]], temperature=0.0, repetition_penalty=50.0)).ids != plain


def test_a_regex_constrains_the_text(vllm_engine: RunningEngine) -> None:
    completion = one(generate(vllm_engine, PROMPTS[:1], [[1]], structured_regex="[0-9]{2,3}"))
    text = make_tiny_tokenizer().decode(completion.ids, skip_special_tokens=True)
    assert re.fullmatch("[0-9]{2,3}", text), text


def test_a_bad_regex_is_refused_and_the_engine_serves_on(vllm_engine: RunningEngine) -> None:
    with pytest.raises(EngineRejects, match="regex"):
        generate(vllm_engine, PROMPTS[:1], [[1]], structured_regex="([0-9")
    assert len(one(generate(vllm_engine, PROMPTS[:1], [[1]])).ids) > 0


def test_a_stop_string_ends_a_completion(vllm_engine: RunningEngine) -> None:
    tokenizer = make_tiny_tokenizer()
    free = one(generate(vllm_engine, PROMPTS[:1], [[1]], extra={"ignore_eos": True})).ids
    word = tokenizer.decode(free[3:4])
    stopped = one(generate(vllm_engine, PROMPTS[:1], [[1]], extra={"ignore_eos": True, "stop": [word]}))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free[: len(stopped.ids)] and len(stopped.ids) <= 4
    assert word in tokenizer.decode(stopped.ids)


def test_bad_words_do_not_come(vllm_engine: RunningEngine) -> None:
    tokenizer = make_tiny_tokenizer()
    greedy = {"temperature": 0.0, "max_tokens": 6}
    free = one(generate(vllm_engine, PROMPTS[:1], [[1]], **greedy)).ids
    word = tokenizer.decode(free[:1])
    spared = one(generate(vllm_engine, PROMPTS[:1], [[1]], **greedy, extra={"bad_words": [word]})).ids
    assert free[0] not in spared
