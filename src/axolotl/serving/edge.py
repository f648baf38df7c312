"""Checks on a request before it may reach the engine, where one bad value can end the process."""

from __future__ import annotations

from axolotl.serving.refusals import Refusal
from axolotl.serving.wire import GenerateRequest

MAX_PROMPTS = 1_024
MAX_N = 256
MAX_TOKENS = 4_000_000
MAX_SEED = 2**63 - 1


def check_generate(request: GenerateRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise a 422 `Refusal` naming the first value, by its index, that the engine must not see."""
    sampling = request.sampling
    if len(request.prompts) > MAX_PROMPTS:
        raise invalid(
            f"prompts: {len(request.prompts)} of them, at most {MAX_PROMPTS} in a request",
            do="lower gradient_accumulation_steps or micro_batch_size: they make the prompts of one request",
        )
    if sampling.n > MAX_N:
        raise invalid(f"sampling.n: {sampling.n}, at most {MAX_N}", do=f"lower trl.num_generations to {MAX_N} or less")
    for index, prompt in enumerate(request.prompts):
        _check_ids(f"prompts[{index}]", prompt, vocab_size)
    if request.score_ids is None:
        _check_lengths(request, max_model_len)
        _check_total(request)
        _check_seeds(request)
    else:
        _check_score_ids(request, request.score_ids, max_model_len, vocab_size)


def invalid(what: str, *, do: str = "") -> Refusal:
    return Refusal(422, "E-SRV-16", f"invalid request: {what}", do=do)


def _check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise invalid(f"{name}: empty")
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise invalid(f"{name}[{position}]: token id {_shown(token)} is not in the vocabulary of {vocab_size}")


def _check_lengths(request: GenerateRequest, max_model_len: int) -> None:
    max_tokens = request.sampling.max_tokens
    for index, prompt in enumerate(request.prompts):
        if len(prompt) + max_tokens > max_model_len:
            raise invalid(
                f"prompts[{index}]: {len(prompt)} tokens and max_tokens {max_tokens} "
                f"are more than max_model_len {max_model_len}"
            )


def _check_total(request: GenerateRequest) -> None:
    sampling = request.sampling
    total = len(request.prompts) * sampling.n * sampling.max_tokens
    if total > MAX_TOKENS:
        raise invalid(
            f"prompts x n x max_tokens: {total} tokens, at most {MAX_TOKENS} in a request",
            do="lower trl.max_completion_length or gradient_accumulation_steps",
        )


def _check_seeds(request: GenerateRequest) -> None:
    if request.seeds is None:
        return
    if len(request.seeds) != len(request.prompts):
        raise invalid(f"seeds: {len(request.seeds)} lists for {len(request.prompts)} prompts")
    for index, seeds in enumerate(request.seeds):
        if len(seeds) != request.sampling.n:
            raise invalid(f"seeds[{index}]: {len(seeds)} seeds for n = {request.sampling.n}")
        for position, seed in enumerate(seeds):
            if not 0 <= seed <= MAX_SEED:
                raise invalid(f"seeds[{index}][{position}]: {_shown(seed)} is not between 0 and {MAX_SEED}")


def _check_score_ids(request: GenerateRequest, score_ids: list[list[int]], max_model_len: int, vocab_size: int) -> None:
    if len(score_ids) != len(request.prompts):
        raise invalid(f"score_ids: {len(score_ids)} lists for {len(request.prompts)} prompts")
    for index, ids in enumerate(score_ids):
        _check_ids(f"score_ids[{index}]", ids, vocab_size)
        total = len(request.prompts[index]) + len(ids)
        if total > max_model_len:
            raise invalid(f"score_ids[{index}]: {total} tokens with the prompt, max_model_len is {max_model_len}")


def _shown(number: int) -> str:
    """Printing a number takes time that grows with the square of its digits."""
    return str(number) if abs(number) < 2**64 else "with more than 64 bits"
