"""Options of `generation_kwargs`: what they are read as, and a named refusal for everything else."""

from __future__ import annotations

import pytest

from axolotl.serving.engines.options import _READERS, TokenRules, token_rules
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import Sampling

EOS = frozenset({2})


def rules(**extra: object) -> TokenRules:
    return token_rules(Sampling(max_tokens=5, extra=extra), EOS, vocab_size=100)


def test_without_options_the_end_token_ends() -> None:
    assert rules() == TokenRules(stop_ids=EOS)


def test_stop_tokens_join_the_end_tokens() -> None:
    assert rules(stop_token_ids=[7]).stop_ids == {2, 7}
    assert rules(stop_token_ids=[7], ignore_eos=True).stop_ids == {7}
    assert rules(ignore_eos=True).stop_ids == frozenset()


def test_before_min_tokens_neither_stop_nor_end_tokens() -> None:
    assert rules(stop_token_ids=[7], min_tokens=2) == TokenRules(frozenset({2, 7}), 2, (2, 7))
    assert rules(ignore_eos=True, min_tokens=2).forbidden_early == (2,)


def test_biases_and_penalties() -> None:
    """JSON turns ids into text; biases are cut to 100 as in vLLM."""
    read = rules(logit_bias={"7": 1, 8: -1000.0}, presence_penalty=1, frequency_penalty=-0.5, allowed_token_ids=[7, 8])
    assert read.logit_bias == {7: 1.0, 8: -100.0}
    assert (read.presence_penalty, read.frequency_penalty, read.allowed_token_ids) == (1.0, -0.5, (7, 8))


def test_null_means_unset() -> None:
    assert rules(**dict.fromkeys(_READERS)) == rules()
    assert rules(stop=None, bad_words=None) == rules()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"stop": ["a"], "no_such": 1}, "does not support no_such, stop; it supports allowed_token_ids, .*stop_token"),
        ({"min_tokens": 6}, "min_tokens 6 is not between 0 and 5"),
        ({"min_tokens": "1"}, "min_tokens needs a whole number"),
        ({"stop_token_ids": 3}, "stop_token_ids needs a list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [100]}, "stop_token_ids: token id 100 is not in the vocabulary of 100"),
        ({"ignore_eos": 1}, "ignore_eos needs true or false"),
        ({"presence_penalty": 2.5}, "presence_penalty needs a number between -2.0 and 2.0"),
        ({"frequency_penalty": "1"}, "frequency_penalty needs a number"),
        ({"logit_bias": {"a": 1}}, "logit_bias needs a mapping"),
        ({"logit_bias": {"1": "x"}}, "logit_bias needs a mapping"),
        ({"logit_bias": {"1": True}}, "logit_bias needs a mapping"),
        ({"logit_bias": [1]}, "logit_bias needs a mapping"),
        ({"logit_bias": {"100": 1}}, "logit_bias: token id 100"),
        ({"allowed_token_ids": []}, "allowed_token_ids needs at least one"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids: token id 100"),
        ({"allowed_token_ids": [2, 7], "stop_token_ids": [7], "min_tokens": 1}, "leaves no token"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(extra: dict[str, object], named: str) -> None:
    with pytest.raises(EngineRejects, match=named):
        rules(**extra)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"structured_regex": "[0-9]+"}, "vllm_guided_decoding_regex"), ({"temperature": 0.001}, "temperature 0.001")],
)
def test_fields_that_cannot_be_honoured(options: dict[str, object], named: str) -> None:
    with pytest.raises(EngineRejects, match=named):
        token_rules(Sampling(max_tokens=5, **options), EOS)


def test_without_a_vocabulary_ids_are_not_looked_at() -> None:
    assert token_rules(Sampling(max_tokens=5, extra={"stop_token_ids": [10**9]}), EOS).stop_ids == {2, 10**9}
