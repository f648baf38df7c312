"""What every generation option must do to tokens and log-probs, whichever engine is behind the server: inherit
`OptionSuite` beside a fixture `subject`.

The oracle is the model's own distribution after one prompt, read through the server token by token, and reshaped here
in float64 by the definition of the option. So every option is compared with exact probabilities, not with "different".
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import ClassVar

import httpx
import numpy as np
import pytest

from axolotl.serving.wire import Completion, ErrorBody, GenerateRequest, GenerateResponse, Sampling
from tests.support.protocol_suite import Subject
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_tokenizer

PROMPT = [5, 6, 7, 8]
HTTP = httpx.Client(transport=httpx.HTTPTransport(verify=False), timeout=300)
NEGATIVE_INFINITY = float("-inf")


class OptionSuite:
    """Needs a fixture `subject` of class or module scope, whose server serves a tiny model.

    draws: completions of one distribution test. eos: the model's end token. supports_regex: constrained output works,
    otherwise it must be refused by name. reports_kept_mass: `Completion.log_kept` is filled when a filter cuts.
    """

    draws: ClassVar[int] = 512
    eos: ClassVar[int] = 2
    supports_regex: ClassVar[bool] = False
    reports_kept_mass: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, subject: Subject) -> np.ndarray:
        """`[VOCAB_SIZE]` log-probs of the first token after `PROMPT` at temperature 1."""
        values = score(subject, [(PROMPT, token) for token in range(VOCAB_SIZE)])
        assert np.exp(values).sum() == pytest.approx(1.0, abs=1e-3)
        return values

    # The distribution of the first token

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_temperature(self, subject: Subject, base: np.ndarray, temperature: float) -> None:
        completions = self.draw(subject, temperature=temperature)
        check_first_tokens(completions, normalised(base / temperature), subject.tolerance)

    @pytest.mark.parametrize("k", [1, 5])
    def test_top_k(self, subject: Subject, base: np.ndarray, k: int) -> None:
        expected = normalised(keep_top_k(base, k))
        check_first_tokens(self.draw(subject, top_k=k), expected, subject.tolerance)

    @pytest.mark.parametrize("p", [0.3, 0.7])
    def test_top_p(self, subject: Subject, base: np.ndarray, p: float) -> None:
        expected = normalised(keep_top_p(base, p))
        assert np.exp(base[np.isfinite(expected)]).sum() >= p
        check_first_tokens(self.draw(subject, top_p=p), expected, subject.tolerance)

    @pytest.mark.parametrize("min_p", [0.1, 0.5])
    def test_min_p(self, subject: Subject, base: np.ndarray, min_p: float) -> None:
        expected = normalised(keep_min_p(base, min_p))
        assert 0 < np.isfinite(expected).sum() < VOCAB_SIZE
        check_first_tokens(self.draw(subject, min_p=min_p), expected, subject.tolerance)

    def test_filters_together(self, subject: Subject, base: np.ndarray) -> None:
        """Temperature first, then min_p, top_k and top_p, each on what the one before it left."""
        options = {"temperature": 1.5, "min_p": 0.02, "top_k": 40, "top_p": 0.8}
        expected = keep_min_p(normalised(base / 1.5), 0.02)
        expected = normalised(keep_top_p(normalised(keep_top_k(expected, 40)), 0.8))
        check_first_tokens(self.draw(subject, **options), expected, subject.tolerance)

    def test_logit_bias(self, subject: Subject, base: np.ndarray) -> None:
        likeliest, unlikely = int(base.argmax()), int(base.argsort()[VOCAB_SIZE // 2])
        biased = base.copy()
        biased[likeliest] -= 1.5
        biased[unlikely] += 4.0
        completions = self.draw(subject, extra={"logit_bias": {str(likeliest): -1.5, str(unlikely): 4.0}})
        check_first_tokens(completions, normalised(biased), subject.tolerance)

    def test_allowed_token_ids(self, subject: Subject, base: np.ndarray) -> None:
        allowed = [int(token) for token in base.argsort()[-12::3]]
        expected = np.full_like(base, NEGATIVE_INFINITY)
        expected[allowed] = base[allowed]
        completions = self.draw(subject, extra={"allowed_token_ids": allowed})
        check_first_tokens(completions, normalised(expected), subject.tolerance)

    @pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.5}])
    def test_the_kept_mass_undoes_the_filters(
        self, subject: Subject, base: np.ndarray, options: dict[str, float]
    ) -> None:
        for completion in self.draw(subject, **options):
            if not self.reports_kept_mass:
                assert completion.log_kept is None
                continue
            assert completion.log_kept is not None and completion.log_kept[0] < 0
            whole = first_logprob(completion) + completion.log_kept[0]
            assert whole == pytest.approx(base[completion.ids[0]], abs=subject.tolerance)

    @pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "top_p": 0.5}])
    def test_without_a_filter_no_mass_is_reported(self, subject: Subject, options: dict[str, float]) -> None:
        assert all(completion.log_kept is None for completion in self.draw(subject, draws=2, **options))

    # Greedy

    def test_temperature_zero_takes_the_likeliest_token(self, subject: Subject, base: np.ndarray) -> None:
        first, second = self.draw(subject, draws=2, temperature=0.0, max_tokens=8)
        assert first.ids == second.ids, "the seed means nothing"
        assert first.ids[0] == base.argmax()
        for position in range(1, len(first.ids)):
            context = [*PROMPT, *first.ids[:position]]
            (again,) = generate(subject, [context], [[99]], temperature=0.0, max_tokens=1)
            assert again[0].ids == [first.ids[position]]

    # Penalties

    def test_repetition_penalty(self, subject: Subject, base: np.ndarray) -> None:
        plain = self.greedy(subject, 24)
        assert len({*PROMPT, *plain.ids}) < len(PROMPT) + len(plain.ids), "without it tokens come back"
        penalised = self.greedy(subject, 24, repetition_penalty=50.0)
        assert len({*PROMPT, *penalised.ids}) == len(PROMPT) + len(penalised.ids)

    def test_repetition_penalty_leaves_other_tokens_in_proportion(self, subject: Subject, base: np.ndarray) -> None:
        """Only tokens of the prompt lose, so that all others gain the same factor."""
        completions = self.draw(subject, repetition_penalty=3.0)
        gains = [first_logprob(c) - base[c.ids[0]] for c in completions if c.ids[0] not in PROMPT]
        assert max(gains) - min(gains) < 2 * subject.tolerance
        most = -math.log1p(-np.exp(base[PROMPT]).sum())
        assert 0 < np.mean(gains) <= most + subject.tolerance

    @pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
    def test_penalties_of_the_completion(self, subject: Subject, name: str) -> None:
        """The second token's distribution, in which the first has lost 1.5 and the prompt's tokens nothing."""
        completions = self.draw(subject, draws=64, max_tokens=2, extra={name: 1.5, "ignore_eos": True})
        contexts = [[*PROMPT, completion.ids[0]] for completion in completions]
        again = score(subject, [(context, context[-1]) for context in contexts])
        drawn = score(subject, [(context, c.ids[1]) for context, c in zip(contexts, completions, strict=True)])
        for completion, old, new in zip(completions, again, drawn, strict=True):
            log_total = math.log1p(math.exp(old - 1.5) - math.exp(old))
            lost = 1.5 if completion.ids[0] == completion.ids[1] else 0.0
            assert completion.logprobs[1] == pytest.approx(new - lost - log_total, abs=2 * subject.tolerance)

    # Where a completion ends

    def test_max_tokens(self, subject: Subject) -> None:
        for length in (1, 7):
            for completion in self.draw(subject, draws=8, max_tokens=length, extra={"ignore_eos": True}):
                assert len(completion.ids) == len(completion.logprobs) == length
                assert completion.finish_reason == "length"

    def test_stop_token_ids(self, subject: Subject) -> None:
        plain = self.greedy(subject, 8)
        stop = next(token for token in plain.ids[1:] if token != plain.ids[0])
        stopped = self.greedy(subject, 8, extra={"stop_token_ids": [stop]})
        assert stopped.ids == plain.ids[: plain.ids.index(stop) + 1], "the token that stops is part of it"
        assert stopped.finish_reason == "stop"

    def test_min_tokens(self, subject: Subject) -> None:
        plain = self.greedy(subject, 8)
        stop = plain.ids[0]
        at_once = self.greedy(subject, 8, extra={"stop_token_ids": [stop]})
        later = self.greedy(subject, 8, extra={"stop_token_ids": [stop], "min_tokens": 4})
        assert at_once.ids == [stop]
        assert len(later.ids) > 4 and stop not in later.ids[:4]

    def test_ignore_eos(self, subject: Subject) -> None:
        options = {"draws": 32, "max_tokens": 40, "temperature": 1.0}
        bias = {"logit_bias": {str(self.eos): 3.0}}
        ended = self.draw(subject, **options, extra=bias)
        assert any(c.finish_reason == "stop" and c.ids[-1] == self.eos for c in ended)
        endless = self.draw(subject, **options, extra={**bias, "ignore_eos": True})
        assert all(len(c.ids) == 40 and c.finish_reason == "length" for c in endless)
        assert any(self.eos in c.ids[:-1] for c in endless)

    # Seeds

    def test_a_seed_decides_wherever_it_stands(self, subject: Subject) -> None:
        (first,) = generate(subject, [PROMPT], [[7, 8, 7]], max_tokens=12)
        second = generate(subject, [[9, 10], PROMPT], [[1, 2], [3, 7]], max_tokens=12)[1]
        assert first[0].ids == first[2].ids == second[1].ids
        assert len({tuple(c.ids) for c in [*first[:2], second[0]]}) == 3

    # Constrained output

    def test_regex(self, subject: Subject) -> None:
        sampling = Sampling(n=4, max_tokens=12, structured_regex="[0-9]{3}")
        reply = post(subject, [PROMPT], sampling, seeds=[[1, 2, 3, 4]])
        if not self.supports_regex:
            assert reply.status_code == 422
            assert "vllm_guided_decoding_regex" in ErrorBody.model_validate_json(reply.content).what
            return
        assert reply.status_code == 200, reply.text
        tokenizer = make_tiny_tokenizer()
        for completion in GenerateResponse.model_validate_json(reply.content).groups[0].completions:
            text = tokenizer.decode(completion.ids, skip_special_tokens=True)
            assert len(text) == 3 and text.isascii() and text.isdigit()

    @pytest.mark.parametrize("extra", [{"no_such_option": 1}, {"seed": 3}, {"logprobs": 5}, {"min_tokens": "many"}])
    def test_what_cannot_be_set_is_refused_by_name(self, subject: Subject, extra: dict[str, object]) -> None:
        reply = post(subject, [PROMPT], Sampling(max_tokens=4, extra=extra))
        assert reply.status_code == 422
        assert next(iter(extra)) in ErrorBody.model_validate_json(reply.content).what

    def draw(self, subject: Subject, *, draws: int | None = None, **options: object) -> list[Completion]:
        """`draws` completions of `PROMPT` with seeds of their own; one token each unless `max_tokens` says so."""
        count = self.draws if draws is None else draws
        size = min(count, 128)
        seeds = [list(range(start, start + size)) for start in range(0, count, size)]
        groups = generate(subject, [PROMPT] * len(seeds), seeds, **{"max_tokens": 1, **options})
        return [completion for group in groups for completion in group]

    def greedy(self, subject: Subject, max_tokens: int, **options: object) -> Completion:
        extra = {"ignore_eos": True, **options.pop("extra", {})}
        return self.draw(subject, draws=1, temperature=0.0, max_tokens=max_tokens, extra=extra, **options)[0]


def generate(
    subject: Subject, prompts: list[list[int]], seeds: list[list[int]], **options: object
) -> list[list[Completion]]:
    """The completions of each prompt."""
    reply = post(subject, prompts, Sampling(**{"n": len(seeds[0]), **options}), seeds=seeds)
    assert reply.status_code == 200, reply.text
    return [group.completions for group in GenerateResponse.model_validate_json(reply.content).groups]


def score(subject: Subject, pairs: Sequence[tuple[list[int], int]]) -> np.ndarray:
    """Log-prob of one token after each context, at temperature 1."""
    prompts = [context for context, _ in pairs]
    reply = post(subject, prompts, Sampling(max_tokens=1), score_ids=[[token] for _, token in pairs])
    assert reply.status_code == 200, reply.text
    groups = GenerateResponse.model_validate_json(reply.content).groups
    return np.array([first_logprob(group.completions[0]) for group in groups])


def post(subject: Subject, prompts: list[list[int]], sampling: Sampling, **fields: object) -> httpx.Response:
    body = GenerateRequest(
        request_id=uuid.uuid4().hex, adapter_version=0, prompts=prompts, sampling=sampling, **fields
    ).model_dump()
    return HTTP.post(f"{subject.server.url}/generate/", headers=subject.server.headers, json=body)


def first_logprob(completion: Completion) -> float:
    value = completion.logprobs[0]
    assert value is not None
    return value


def check_first_tokens(completions: list[Completion], expected: np.ndarray, tolerance: float) -> None:
    """First tokens occur as often as `expected` says and carry its log-probs. expected: `[VOCAB_SIZE]` log-probs.

    A chi-square test over the eight likeliest tokens and the rest, with the seeds fixed.
    """
    tokens = np.array([completion.ids[0] for completion in completions])
    assert np.isfinite(expected[tokens]).all(), "a token was drawn that the option excludes"
    assert [first_logprob(c) for c in completions] == pytest.approx(list(expected[tokens]), abs=tolerance)
    likeliest = expected.argsort()[::-1][:8]
    shares = np.exp(expected[likeliest])
    counts = np.array([(tokens == token).sum() for token in likeliest])
    is_left = 1 - shares.sum() > 1e-6
    shares = np.append(shares, 1 - shares.sum()) if is_left else shares
    counts = np.append(counts, len(tokens) - counts.sum()) if is_left else counts
    is_possible = shares > 0
    wanted = shares[is_possible] * len(tokens)
    statistic = ((counts[is_possible] - wanted) ** 2 / wanted).sum()
    assert statistic < chi_square_limit(int(is_possible.sum()) - 1)


def chi_square_limit(degrees: int) -> float:
    """About the 0.01 % point (Wilson and Hilferty's approximation)."""
    if degrees == 0:
        return 1e-9
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.72 * math.sqrt(spread)) ** 3)


def normalised(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits)


def keep_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    return np.where(logits >= np.sort(logits)[-k], logits, NEGATIVE_INFINITY)


def keep_top_p(logprobs: np.ndarray, p: float) -> np.ndarray:
    """The likeliest tokens up to and with the one that lifts their sum to p."""
    order = logprobs.argsort()[::-1]
    before = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
    result = np.full_like(logprobs, NEGATIVE_INFINITY)
    kept = order[before < p]
    result[kept] = logprobs[kept]
    return result


def keep_min_p(logprobs: np.ndarray, min_p: float) -> np.ndarray:
    return np.where(logprobs >= logprobs.max() + math.log(min_p), logprobs, NEGATIVE_INFINITY)
