"""Batched decoding against transformers' generate and against plain forwards, on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from axolotl.serving.engines import decoding
from axolotl.serving.engines.attention import GROUPED_SDPA
from axolotl.serving.engines.decoding import decode
from axolotl.serving.engines.inference import DecodingCancelled
from axolotl.serving.engines.scoring import score
from axolotl.serving.engines.work import Work
from axolotl.serving.logprobs import policy_logprobs
from axolotl.serving.wire import Group, Sampling
from tests.support.tiny_model import VOCAB_SIZE, tiny_config

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
SEEDS = [[100 * prompt + index for index in range(4)] for prompt in range(3)]
EOS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[(2, "sdpa"), (1, GROUPED_SDPA)], ids=["plain", "grouped"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """With as many key heads as query heads, and with one key head for all, through the engine's own attention."""
    key_heads, attention = request.param
    torch.manual_seed(0)
    config = tiny_config(num_key_value_heads=key_heads, attn_implementation=attention)
    return LlamaForCausalLM(config).eval()


def run(model: LlamaForCausalLM, prompts: list[list[int]], seeds: list[list[int]], **options: object) -> list[Group]:
    sampling = Sampling(**{"n": len(seeds[0]), "max_tokens": 12, **options})
    return decode(model, prompts, sampling, seeds, eos_token_ids={EOS}, pad_token_id=0)


def ids_of(groups: list[Group]) -> list[list[list[int]]]:
    return [[completion.ids for completion in group.completions] for group in groups]


def test_greedy_equals_generate(model: LlamaForCausalLM) -> None:
    groups = run(model, PROMPTS, [[0], [0], [0]], temperature=0.0)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)
        assert group.completions[0].ids == expected[0, len(prompt) :].tolist()


def test_log_probs_equal_a_full_forward(model: LlamaForCausalLM) -> None:
    for group, prompt in zip(run(model, PROMPTS, SEEDS, temperature=0.8), PROMPTS, strict=True):
        for completion in group.completions:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1]
            logps = (logits / 0.8).log_softmax(-1)
            expected = logps.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0].tolist()
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_completion_does_not_depend_on_its_batch(model: LlamaForCausalLM) -> None:
    together = run(model, PROMPTS, SEEDS)
    for prompt, seeds, group in zip(PROMPTS, SEEDS, together, strict=True):
        for seed, completion in zip(seeds, group.completions, strict=True):
            (alone,) = run(model, [prompt], [[seed]])
            assert alone.completions[0].ids == completion.ids
            assert alone.completions[0].logprobs == pytest.approx(completion.logprobs, abs=1e-4)


def test_small_batches_give_the_same_completions(model: LlamaForCausalLM) -> None:
    """51 cache positions are three rows of 17, so groups are cut."""
    sampling = Sampling(n=4, max_tokens=12)
    cut = decode(model, PROMPTS, sampling, SEEDS, eos_token_ids={EOS}, pad_token_id=0, max_cache_tokens=51)
    assert ids_of(cut) == ids_of(run(model, PROMPTS, SEEDS))


def test_seeds_decide(model: LlamaForCausalLM) -> None:
    assert ids_of(run(model, PROMPTS, SEEDS)) == ids_of(run(model, PROMPTS, SEEDS))
    other = [[seed + 1000 for seed in row] for row in SEEDS]
    assert ids_of(run(model, PROMPTS, SEEDS)) != ids_of(run(model, PROMPTS, other))


def test_first_tokens_have_the_models_probabilities(model: LlamaForCausalLM) -> None:
    """The 8 likeliest tokens and the rest, 4,000 fixed seeds; 26.1 is the 0.1 % point for 8 degrees of freedom."""
    count = 4_000
    seeds = [list(range(start, start + 1_000)) for start in range(0, count, 1_000)]
    groups = run(model, [[5, 6]] * 4, seeds, max_tokens=1)
    with torch.no_grad():
        probabilities = model(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1)
    top = probabilities.topk(8)
    drawn = torch.bincount(
        torch.tensor([c.ids[0] for group in groups for c in group.completions]), minlength=VOCAB_SIZE
    )
    observed = torch.cat([drawn[top.indices], (count - drawn[top.indices].sum())[None]])
    expected = torch.cat([top.values, 1 - top.values.sum(0, keepdim=True)]) * count
    assert ((observed - expected) ** 2 / expected).sum() < 26.1


def test_completions_end_at_the_end_token_or_at_the_limit(model: LlamaForCausalLM) -> None:
    groups = run(model, PROMPTS, SEEDS, max_tokens=40, extra={"stop_token_ids": list(range(100, 200))})
    completions = [completion for group in groups for completion in group.completions]
    stops = {EOS, *range(100, 200)}
    assert {completion.finish_reason for completion in completions} >= {"stop"}
    for completion in completions:
        assert not stops & set(completion.ids[:-1])
        assert (completion.ids[-1] in stops) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.ids) == 40


def test_min_tokens_and_ignore_eos(model: LlamaForCausalLM) -> None:
    stops = list(range(100, 300))
    groups = run(model, PROMPTS, SEEDS, extra={"stop_token_ids": stops, "min_tokens": 5})
    assert all(len(completion.ids) > 5 for group in groups for completion in group.completions)
    free = run(model, PROMPTS, SEEDS, temperature=3.0, max_tokens=60, extra={"ignore_eos": True})
    assert all(len(completion.ids) == 60 for group in free for completion in group.completions)
    assert any(EOS in completion.ids for group in free for completion in group.completions)


def test_repetition_penalty_knows_the_prompt_and_not_the_padding(model: LlamaForCausalLM) -> None:
    """Greedy with a strong penalty never repeats; token 0, the padding, is not penalised for being padding."""
    options = {"temperature": 0.0, "repetition_penalty": 50.0}
    groups = run(model, PROMPTS, [[0], [0], [0]], **options)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        (alone,) = run(model, [prompt], [[0]], **options)
        assert alone.completions[0].ids == group.completions[0].ids
        tokens = [*prompt, *group.completions[0].ids]
        assert len(set(tokens)) == len(tokens)


def test_scores_equal_the_sampled_log_probs(model: LlamaForCausalLM) -> None:
    groups = run(model, PROMPTS, [[1], [2], [3]], temperature=0.7)
    tokens = [group.completions[0].ids for group in groups]
    for scored, group in zip(score(model, PROMPTS, tokens, 0.7, max_logit_rows=5), groups, strict=True):
        assert scored == pytest.approx(group.completions[0].logprobs, abs=1e-4)


def test_a_group_is_reported_with_its_last_completion(model: LlamaForCausalLM) -> None:
    """Counted in sampled tokens: a group is there as soon as its longest completion is, whatever the others do."""
    reported: dict[int, int] = {}
    work = Work()
    sampling = Sampling(n=2, max_tokens=30, extra={"stop_token_ids": list(range(100, 130))})
    groups = decode(
        model,
        PROMPTS,
        sampling,
        [row[:2] for row in SEEDS],
        eos_token_ids={EOS},
        pad_token_id=0,
        on_group=lambda group: reported.update({group.index: work.generated}),
        work=work,
    )
    lengths = [[len(completion.ids) for completion in group.completions] for group in groups]
    flat = [length for row in lengths for length in row]
    for index, row in enumerate(lengths):
        assert reported[index] == sum(min(length, max(row)) for length in flat)
    assert len(set(reported.values())) == 3, "they end one by one"


def test_a_group_in_two_batches_is_reported_once(model: LlamaForCausalLM) -> None:
    """16 cache positions are one row, so every completion is a batch of its own."""
    reported: list[Group] = []
    sampling = Sampling(n=4, max_tokens=11)
    groups = decode(
        model,
        PROMPTS,
        sampling,
        SEEDS,
        eos_token_ids={EOS},
        pad_token_id=0,
        max_cache_tokens=16,
        on_group=reported.append,
    )
    assert reported == groups and [group.index for group in groups] == [0, 1, 2]
    assert ids_of(groups) == ids_of(run(model, PROMPTS, SEEDS, max_tokens=11))


def test_prompts_are_read_in_pieces(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 positions a pass are two columns of three prompts, so the shorter prompts begin with padding only."""
    whole = run(model, PROMPTS, SEEDS)
    widths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, options: widths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 6)
    pieces = run(model, PROMPTS, SEEDS)
    hook.remove()
    assert widths[:3] == [2, 2, 1]
    assert ids_of(pieces) == ids_of(whole)
    for first, second in zip(pieces, whole, strict=True):
        for piece, one in zip(first.completions, second.completions, strict=True):
            assert piece.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_work_counts_every_token_once(model: LlamaForCausalLM) -> None:
    work = Work()
    groups = decode(model, PROMPTS, Sampling(n=4, max_tokens=12), SEEDS, eos_token_ids={EOS}, pad_token_id=0, work=work)
    sampled = sum(len(completion.ids) for group in groups for completion in group.completions)
    assert (work.processed, work.generated) == (sum(map(len, PROMPTS)) + sampled, sampled)


def test_the_kept_mass_leads_back_to_the_whole_distribution(model: LlamaForCausalLM) -> None:
    """Against a full forward and torch's log_softmax, with a filter that cuts differently at each position."""
    for group, prompt in zip(run(model, PROMPTS, SEEDS, temperature=0.8, top_p=0.6), PROMPTS, strict=True):
        for completion in group.completions:
            assert completion.log_kept is not None and len(set(completion.log_kept)) > 1
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1]
            whole = (logits / 0.8).log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None])[:, 0].tolist()
            assert policy_logprobs(completion) == pytest.approx(whole, abs=1e-4)
            assert all(a > b for a, b in zip(completion.logprobs, whole, strict=True))


def test_penalties_look_at_each_completion_alone(model: LlamaForCausalLM) -> None:
    """Greedy with the strongest penalty, against a loop of plain forwards; the prompt's tokens are free."""
    options = {"temperature": 0.0, "extra": {"frequency_penalty": 2.0, "presence_penalty": 1.0, "ignore_eos": True}}
    for prompt, group in zip(PROMPTS, run(model, PROMPTS, [[0], [0], [0]], **options), strict=True):
        written: list[int] = []
        for _ in range(12):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + written])).logits[0, -1]
            for token in set(written):
                logits[token] -= 2.0 * written.count(token) + 1.0
            written.append(int(logits.argmax()))
        assert group.completions[0].ids == written


def test_cancelling_ends_the_request(model: LlamaForCausalLM) -> None:
    asked = iter([False, False, True])
    with pytest.raises(DecodingCancelled):
        decode(
            model,
            PROMPTS,
            Sampling(max_tokens=50),
            [[0], [0], [0]],
            eos_token_ids=set(),
            pad_token_id=0,
            is_cancelled=lambda: next(asked),
        )
    assert next(asked, None) is None


def test_the_models_mode_is_put_back(model: LlamaForCausalLM) -> None:
    model.train()
    try:
        run(model, [[5]], [[0]])
        assert model.training
    finally:
        model.eval()
