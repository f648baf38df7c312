"""Whether what came belongs to what was asked."""

from __future__ import annotations

import pytest

from axolotl.errors import ServerError
from axolotl.serving.reply import Answers
from axolotl.serving.wire import Completion, GenerateRequest, Group, Sampling, StreamStart

REQUEST = GenerateRequest(
    request_id="r",
    adapter_version=2,
    prompts=[[1], [2], [3]],
    sampling=Sampling(n=1, max_tokens=3),
    seeds=[[4], [5], [6]],
)
GOOD = Completion(ids=[5, 6], logprobs=[-1.0, None], finish_reason="stop")


def group(index: int, **changes: object) -> Group:
    return Group(index=index, completions=[GOOD.model_copy(update=changes)])


def asked(request: GenerateRequest = REQUEST) -> Answers:
    answers = Answers(request, 100)
    answers.missing()
    return answers


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (Group(index=0, completions=[]), "group 0 has 0 completions, not 1"),
        (Group(index=0, completions=[GOOD, GOOD]), "2 completions, not 1"),
        (group(0, logprobs=[-1.0]), "2 tokens and 1 log-probs"),
        (group(0, log_kept=[-1.0]), "2 tokens and 1 kept masses"),
        (group(0, ids=[], logprobs=[]), "0 tokens, max_tokens is 3"),
        (group(0, ids=[1] * 4, logprobs=[-1.0] * 4), "4 tokens, max_tokens is 3"),
        (group(0, ids=[5, 100]), "outside the vocabulary of 100"),
        (group(0, ids=[5, -1]), "outside the vocabulary"),
        (group(3), "group 3 was not asked for"),
        (group(-1), "group -1 was not asked for"),
    ],
)
def test_groups_that_do_not_fit(wrong: Group, named: str) -> None:
    answers = asked()
    with pytest.raises(ServerError) as problem:
        answers.add(wrong)
    assert problem.value.code == "E-SRV-09" and named in problem.value.why
    assert answers.groups == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"request_id": "x"}, "request_id"), ({"instance_id": "x"}, "instance_id"), ({"adapter_version": 1}, "is 1")],
)
def test_a_start_of_another_answer(changes: dict[str, object], named: str) -> None:
    start = StreamStart(request_id="r", instance_id="a", adapter_version=2)
    asked().check_start(start, "a")
    with pytest.raises(ServerError) as problem:
        asked().check_start(start.model_copy(update=changes), "a")
    assert problem.value.code == "E-SRV-09" and named in problem.value.why


def test_other_tokens_than_those_to_score() -> None:
    answers = asked(REQUEST.model_copy(update={"score_ids": [[5, 6], [7], [8]], "seeds": None}))
    answers.add(group(0))
    with pytest.raises(ServerError) as problem:
        answers.add(group(1))
    assert "scores other tokens" in problem.value.why


def test_what_is_missing_keeps_its_seeds_and_gets_its_numbers_back() -> None:
    answers = asked()
    assert answers.missing() == REQUEST
    answers.add(group(1))
    rest = answers.missing()
    assert (rest.prompts, rest.seeds, rest.request_id) == ([[1], [3]], [[4], [6]], "r")
    assert answers.add(group(1)).index == 2
    with pytest.raises(ServerError, match="does not fit"):
        answers.check_end()
    assert answers.add(group(0)).index == 0
    answers.check_end()
    assert answers.is_complete and [item.index for item in answers.groups] == [0, 1, 2]


def test_groups_name_the_process_and_the_answer_its_version() -> None:
    answers = asked()
    for instance_id in ("a", "b"):
        answers.missing()
        answers.check_start(StreamStart(request_id="r", instance_id=instance_id, adapter_version=2), instance_id)
        answers.add(group(0))
    assert [(item.index, item.instance_id) for item in answers.groups] == [(0, "a"), (1, "b")]
    assert answers.adapter_version == 2


def test_a_group_that_comes_twice() -> None:
    answers = asked()
    answers.add(group(0))
    with pytest.raises(ServerError) as problem:
        answers.add(group(0))
    assert "came twice" in problem.value.why
