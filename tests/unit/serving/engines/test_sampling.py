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
from axolotl.serving.engines.history import TokenHistory
from axolotl.serving.engines.options import TokenRules
from axolotl.serving.engines.sampling import (
    UniformStream,
    adjust,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_probs_of,
    penalise_repetition,
    truncate,
)
from axolotl.serving.wire import Sampling

NO_RULES = TokenRules(stop_ids=frozenset())


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("k", [1, 5, 50, 80])
def test_top_k_equals_transformers(logits: torch.Tensor, k: int) -> None:
    assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(None, logits))


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_equals_transformers(logits: torch.Tensor, p: float) -> None:
    assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(None, logits))


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.2, 0.9])
def test_top_p_in_a_large_vocabulary(spread: float, p: float) -> None:
    """With and without the set reaching beyond `LIKELY_TOKENS`, rows of both kinds in one batch included."""
    logits = torch.randn(4, 3_000, generator=torch.Generator().manual_seed(2)) * spread
    logits[0] *= 8
    kept = keep_top_p(logits, p)
    for row, whole in zip(kept, logits, strict=True):
        probabilities = whole.double().softmax(-1)
        mass = probabilities[row.isfinite()].sum()
        assert mass >= p - 1e-5 and mass - probabilities[row.isfinite()].min() < p + 1e-5
        assert probabilities[row.isfinite()].min() >= probabilities[row.isinf()].max()
        assert torch.equal(row[row.isfinite()], whole[row.isfinite()])


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_equals_transformers(logits: torch.Tensor, min_p: float) -> None:
    assert torch.equal(keep_min_p(logits, min_p), MinPLogitsWarper(min_p)(None, logits))


def test_repetition_penalty_equals_transformers(logits: torch.Tensor) -> None:
    ids = torch.randint(0, 50, (6, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    torch.testing.assert_close(penalise_repetition(logits, seen, 1.3), expected)


def test_all_options_together_equal_transformers(logits: torch.Tensor) -> None:
    """In vLLM's order: min-p looks at the whole distribution."""
    ids = torch.randint(0, 50, (6, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    expected = logits.clone()
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.7),
        MinPLogitsWarper(0.05),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
    ):
        expected = processor(ids, expected)
    sampling = Sampling(max_tokens=1, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
    whole = adjust(logits, sampling, NO_RULES, TokenHistory(seen=seen))
    torch.testing.assert_close(truncate(whole, sampling)[0], expected)


def test_kept_mass_by_hand() -> None:
    """Shares 1/2, 1/4, 1/8, 1/8: top_k 1 keeps 1/2, top_p 0.6 keeps 3/4, min_p 0.3 keeps 3/4 (1/4 is half of 1/2)."""
    logits = torch.tensor([[math.log(4), math.log(2), 0.0, 0.0]])
    for options, mass in (({"top_k": 1}, 0.5), ({"top_p": 0.6}, 0.75), ({"min_p": 0.3}, 0.75), ({"top_k": 4}, 1.0)):
        _, log_kept = truncate(logits, Sampling(max_tokens=1, **options))
        assert log_kept is not None and log_kept.tolist() == pytest.approx([math.log(mass)], abs=1e-6)


@pytest.mark.parametrize(
    "options", [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}]
)
def test_log_prob_and_kept_mass_give_the_whole_distribution(logits: torch.Tensor, options: dict[str, float]) -> None:
    sampling = Sampling(max_tokens=1, temperature=0.8, **options)
    whole = adjust(logits, sampling, NO_RULES, TokenHistory())
    kept, log_kept = truncate(whole, sampling)
    assert log_kept is not None and (log_kept < 0).all()
    is_kept = kept.isfinite()
    restored = (kept.log_softmax(-1) + log_kept[:, None])[is_kept]
    torch.testing.assert_close(restored, (logits / 0.8).log_softmax(-1)[is_kept], atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "top_k": 3}])
def test_without_a_filter_there_is_no_mass(logits: torch.Tensor, options: dict[str, float]) -> None:
    kept, log_kept = truncate(logits, Sampling(max_tokens=1, **options))
    assert log_kept is None and torch.equal(kept, logits)


def test_penalties_of_the_completion_by_hand() -> None:
    """Token 1 was written twice, token 3 once: they lose 2 x 0.5 + 1.5 and 0.5 + 1.5."""
    rules = TokenRules(stop_ids=frozenset(), presence_penalty=1.5, frequency_penalty=0.5)
    history = TokenHistory.of_prompts(torch.tensor([[1, 0]]), torch.ones(1, 2).long(), 4, Sampling(max_tokens=1), rules)
    for token in (1, 3, 1):
        history.add(torch.tensor([token]))
    adjusted = adjust(torch.zeros(1, 4), Sampling(max_tokens=1), rules, history)
    assert adjusted.tolist() == [[0.0, -2.5, 0.0, -2.0]]


def test_history_follows_the_rows() -> None:
    """Padding is not seen; after a selection the remaining row keeps its own tokens."""
    rules = TokenRules(stop_ids=frozenset(), presence_penalty=1.0)
    sampling = Sampling(max_tokens=1, repetition_penalty=2.0)
    history = TokenHistory.of_prompts(
        torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [1, 1]]), 5, sampling, rules
    )
    history.add(torch.tensor([4, 0]))
    assert history.seen is not None and history.seen[0].nonzero().flatten().tolist() == [1, 4]
    history.select(torch.tensor([1]))
    history.add(torch.tensor([0]))
    assert history.seen.nonzero()[:, 1].tolist() == [0, 2, 3]
    assert history.counts is not None and history.counts.tolist() == [[2, 0, 0, 0, 0]]


def test_a_request_without_penalties_keeps_no_history() -> None:
    history = TokenHistory.of_prompts(
        torch.tensor([[0, 1]]), torch.ones(1, 2).long(), 5, Sampling(max_tokens=1), NO_RULES
    )
    assert history == TokenHistory(None, None)


def test_biases_by_hand() -> None:
    rules = TokenRules(stop_ids=frozenset(), logit_bias={1: 2.0, 3: -1.0}, allowed_token_ids=(1, 2))
    bias = rules.bias(4, torch.device("cpu"))
    adjusted = adjust(torch.zeros(1, 4), Sampling(max_tokens=1), rules, TokenHistory(), bias=bias)
    assert adjusted.tolist() == [[-math.inf, 2.0, 0.0, -math.inf]]
    assert NO_RULES.bias(4, torch.device("cpu")) is None


def test_forbidden_tokens_cannot_be_drawn(logits: torch.Tensor) -> None:
    adjusted = adjust(logits, Sampling(max_tokens=1), NO_RULES, TokenHistory(), forbidden=(3, 4))
    assert torch.isinf(adjusted[:, [3, 4]]).all() and torch.isfinite(adjusted[:, 5:]).all()
    assert torch.isfinite(logits).all(), "the model's logits are left alone"


def test_greedy_keeps_the_distribution_at_temperature_one(logits: torch.Tensor) -> None:
    assert torch.equal(adjust(logits, Sampling(max_tokens=1, temperature=0.0), NO_RULES, TokenHistory()), logits)


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


def test_logits_that_are_not_finite_are_a_numeric_fault() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    with pytest.raises(NumericError, match="no longer finite"):
        draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64))
