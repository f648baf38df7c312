"""Filters against transformers' own processors, and drawing against the distribution it draws from."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from axolotl.errors import NumericError
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.sampling import (
    UniformStream,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_probs_of,
    penalise_repetition,
    process,
    stop_rule,
)
from axolotl.serving.wire import Sampling

EOS = frozenset({2})


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("k", [1, 5, 50, 80])
def test_top_k_equals_transformers(logits: torch.Tensor, k: int) -> None:
    assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(None, logits))


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_equals_transformers(logits: torch.Tensor, p: float) -> None:
    assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(None, logits))


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_equals_transformers(logits: torch.Tensor, min_p: float) -> None:
    assert torch.equal(keep_min_p(logits, min_p), MinPLogitsWarper(min_p)(None, logits))


def test_repetition_penalty_equals_transformers(logits: torch.Tensor) -> None:
    ids = torch.randint(0, 50, (6, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    torch.testing.assert_close(penalise_repetition(logits, seen, 1.3), expected)


def test_all_options_together_equal_transformers(logits: torch.Tensor) -> None:
    ids = torch.randint(0, 50, (6, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    expected = logits.clone()
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.05),
    ):
        expected = processor(ids, expected)
    sampling = Sampling(max_tokens=1, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
    torch.testing.assert_close(process(logits, sampling, seen=seen, forbidden=()), expected)


def test_forbidden_tokens_cannot_be_drawn(logits: torch.Tensor) -> None:
    processed = process(logits, Sampling(max_tokens=1), seen=None, forbidden=(3, 4))
    assert torch.isinf(processed[:, [3, 4]]).all() and torch.isfinite(processed[:, 5:]).all()
    assert torch.isfinite(logits).all(), "the model's logits are left alone"


def test_greedy_keeps_the_distribution_at_temperature_one(logits: torch.Tensor) -> None:
    assert torch.equal(
        process(logits, Sampling(max_tokens=1, temperature=0.0, top_k=1), seen=None, forbidden=()), logits
    )


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.249, 1), (0.251, 2), (0.749, 2), (0.751, 4), (1 - 2**-53, 4)]
)
def test_draw_by_hand(uniform: float, token: int) -> None:
    """Tokens 1, 2 and 4 have shares 1/4, 1/2 and 1/4; tokens 0, 3 and 5 none."""
    logits = torch.tensor([[-math.inf, 0.0, math.log(2), -math.inf, 0.0, -math.inf]])
    tokens, logps = draw(logits, torch.tensor([uniform], dtype=torch.float64))
    assert tokens.tolist() == [token]
    assert logps.tolist() == pytest.approx([math.log(1 / 2 if token == 2 else 1 / 4)])


def test_drawn_tokens_have_the_probabilities_of_the_logits() -> None:
    """Chi-square over 20,000 fixed seeds; 37.7 is the 0.1 % point for 15 degrees of freedom."""
    count = 20_000
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(3))
    uniforms = UniformStream(list(range(count))).next(list(range(count)))
    drawn = torch.bincount(draw(logits.expand(count, -1), uniforms)[0], minlength=16)
    expected = logits.softmax(-1)[0] * count
    assert ((drawn - expected) ** 2 / expected).sum() < 37.7


def test_uniforms_depend_on_the_seed_and_the_position_only() -> None:
    together, alone = UniformStream([7, 8, 9]), UniformStream([8])
    first = together.next([0, 1, 2])
    second = together.next([1, 2])
    assert [first[1], second[0]] == [alone.next([0])[0], alone.next([0])[0]]
    assert first.unique().numel() == 3 and ((first >= 0) & (first < 1)).all()


def test_log_probs_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3), -math.inf]])
    assert log_probs_of(logits, torch.tensor([1])).tolist() == pytest.approx([math.log(0.75)])


def test_stop_rule_from_generation_kwargs() -> None:
    rule = stop_rule(Sampling(max_tokens=5, extra={"stop_token_ids": [7], "min_tokens": 2}), EOS)
    assert (rule.stop_ids, rule.min_tokens, rule.forbidden_early) == ({2, 7}, 2, (2, 7))
    assert stop_rule(Sampling(max_tokens=5, extra={"ignore_eos": True}), EOS).stop_ids == frozenset()


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(max_tokens=4, extra={"presence_penalty": 1, "logit_bias": {}}), "logit_bias, presence_penalty"),
        (Sampling(max_tokens=4, structured_regex="[0-9]+"), "vllm_guided_decoding_regex"),
        (Sampling(max_tokens=4, extra={"min_tokens": 5}), "min_tokens 5"),
        (Sampling(max_tokens=4, extra={"min_tokens": "1"}), "min_tokens"),
        (Sampling(max_tokens=4, extra={"stop_token_ids": 3}), "stop_token_ids"),
        (Sampling(max_tokens=4, extra={"stop_token_ids": [-1]}), "stop_token_ids"),
        (Sampling(max_tokens=4, extra={"ignore_eos": 1}), "ignore_eos"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(sampling: Sampling, named: str) -> None:
    with pytest.raises(EngineRejects, match=named):
        stop_rule(sampling, EOS)


def test_logits_that_are_not_finite_are_a_numeric_fault() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    with pytest.raises(NumericError, match="no longer finite"):
        draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64))
