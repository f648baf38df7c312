"""Limits of a request: each refusal names the field, the value and the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from axolotl.serving.bounds import MAX_DEPTH, MAX_SIZE
from axolotl.serving.edge import MAX_N, MAX_PROMPTS, MAX_TOKENS, check_generate
from axolotl.serving.refusals import MAX_TEXT, Refusal
from axolotl.serving.wire import GenerateRequest, Sampling, SessionRequest, SetAdapterRequest

VALID = {
    "request_id": "r-1",
    "adapter_version": 0,
    "prompts": [[1, 2]],
    "sampling": {"n": 1, "max_tokens": 4},
    "seeds": [[7]],
}


def request(**changes: Any) -> GenerateRequest:
    sampling = {**VALID["sampling"], **changes.pop("sampling", {})}
    return GenerateRequest.model_validate({**VALID, **changes, "sampling": sampling})


def refused(body: GenerateRequest, *, max_model_len: int = 100_000) -> str:
    with pytest.raises(Refusal) as problem:
        check_generate(body, max_model_len=max_model_len, vocab_size=300)
    assert problem.value.status == 422
    return problem.value.body.what


def test_the_valid_request_is_let_through() -> None:
    check_generate(request(), max_model_len=6, vocab_size=300)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompts": [[1]] * (MAX_PROMPTS + 1)}, f"prompts: {MAX_PROMPTS + 1} of them, at most {MAX_PROMPTS}"),
        ({"sampling": {"n": MAX_N + 1}}, f"sampling.n: {MAX_N + 1}, at most {MAX_N}"),
        ({"prompts": [[1], []]}, "prompts[1]: empty"),
        ({"prompts": [[1, 300]]}, "prompts[0][1]: token id 300 is not in the vocabulary of 300"),
        ({"prompts": [[-1]]}, "prompts[0][0]: token id -1"),
        ({"prompts": [[10**400]]}, "prompts[0][0]: token id with more than 64 bits"),
        ({"sampling": {"max_tokens": 99_999}}, "prompts[0]: 2 tokens and max_tokens 99999 are more than"),
        ({"seeds": [[7, 8]]}, "seeds[0]: 2 seeds for n = 1"),
        ({"seeds": [[-1]]}, "seeds[0][0]: -1 is not between 0"),
        ({"seeds": [[10**400]]}, "seeds[0][0]: with more than 64 bits"),
        ({"seeds": []}, "seeds: 0 lists for 1 prompts"),
        ({"score_ids": [[]]}, "score_ids[0]: empty"),
        ({"score_ids": [[1], [2]]}, "score_ids: 2 lists for 1 prompts"),
        ({"score_ids": [[1] * 99_999]}, "score_ids[0]: 100001 tokens with the prompt, max_model_len is 100000"),
    ],
)
def test_what_the_engine_must_not_see(changes: dict[str, Any], says: str) -> None:
    assert says in refused(request(**changes))


def test_the_tokens_of_a_request_are_bounded_together() -> None:
    largest = request(prompts=[[1]] * 100, sampling={"n": 4, "max_tokens": MAX_TOKENS // 400}, seeds=None)
    check_generate(largest, max_model_len=100_000, vocab_size=300)
    more = request(prompts=[[1]] * 101, sampling={"n": 4, "max_tokens": MAX_TOKENS // 400}, seeds=None)
    assert f"prompts x n x max_tokens: 4040000 tokens, at most {MAX_TOKENS}" in refused(more)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ('{"temperature": NaN}', "temperature"),
        ('{"temperature": 1e999}', "temperature"),
        ('{"top_p": Infinity}', "top_p"),
        ('{"min_p": NaN}', "min_p"),
        ('{"repetition_penalty": 1e999}', "repetition_penalty"),
        ('{"top_k": 2147483648}', "top_k"),
        ('{"max_tokens": 2147483648}', "max_tokens"),
        ('{"extra": {"a": NaN}}', "nan is not finite"),
        ('{"extra": {"a": [{"b": -1e999}]}}', "-inf is not finite"),
        ('{"extra": {"a": 9223372036854775808}}', "more than 64 bits"),
        (json.dumps({"extra": {"a": deep(MAX_DEPTH)}}), f"nested deeper than {MAX_DEPTH}"),
        (json.dumps({"extra": {"a": "x" * MAX_SIZE}}), f"more than {MAX_SIZE} characters"),
        (json.dumps({"extra": {"x" * MAX_SIZE: 1}}), f"more than {MAX_SIZE} characters"),
        (json.dumps({"extra": {"a": [0] * MAX_SIZE}}), f"more than {MAX_SIZE} characters"),
        (json.dumps({"structured_regex": "a" * 4097}), "structured_regex"),
    ],
)
def test_sampling_numbers_are_finite_and_free_options_bounded(sampling: str, says: str) -> None:
    with pytest.raises(ValidationError) as problem:
        Sampling.model_validate({"max_tokens": 1, **json.loads(sampling)})
    assert says in str(problem.value)


def test_free_options_within_the_bounds_pass() -> None:
    extra = {"a": deep(MAX_DEPTH - 1), "stop_token_ids": list(range(100)), "b": {"c": -0.5}}
    assert Sampling(max_tokens=1, extra=extra).extra == extra


@pytest.mark.parametrize("request_id", ["", "a" * 129, "a b", "a\nb", "a\0", "\N{SNOWMAN}", "\x1b[31m"])
def test_a_request_id_is_short_and_printable(request_id: str) -> None:
    with pytest.raises(ValidationError, match="request_id"):
        request(request_id=request_id)


@pytest.mark.parametrize(
    "run_id",
    ["../x", "..", "/etc", "~", "%2e%2e", "a\0", "．．", "a" * 65, "a" * 4096, "", "A", "a\n", "a/b", "a.b", "\ud800"],
)
def test_a_run_id_is_no_path(run_id: str) -> None:
    with pytest.raises(ValidationError, match="run_id"):
        SetAdapterRequest(run_id=run_id, version=1, manifest_sha256="0" * 64)


@pytest.mark.parametrize("version", [0, -1, 2**31, 10**400, 1.5, "1/../2", None])
def test_a_version_is_a_small_number(version: object) -> None:
    with pytest.raises(ValidationError, match="version"):
        SetAdapterRequest.model_validate({"run_id": "a", "version": version, "manifest_sha256": "0" * 64})


@pytest.mark.parametrize("changes", [{"pid": -1}, {"pid": 2**31}, {"host": "a\nb"}, {"host": "h" * 256}])
def test_what_a_run_says_of_itself_can_be_printed(changes: dict[str, Any]) -> None:
    fingerprint = {"base_model": "m", "config": "c", "tokenizer": "t", "weights": "", "summary": {}}
    valid = {"run_id": "a", "host": "h", "pid": 1, "fingerprint": fingerprint}
    SessionRequest.model_validate(valid)
    with pytest.raises(ValidationError, match=next(iter(changes))):
        SessionRequest.model_validate({**valid, **changes})


def test_the_text_of_a_refusal_can_be_sent_and_is_bounded() -> None:
    body = Refusal(422, "E-SRV-16", "x" * 10_000, why="half a pair \ud800").body
    assert len(body.what) == MAX_TEXT and body.why == "half a pair ?"
    body.model_dump_json()
