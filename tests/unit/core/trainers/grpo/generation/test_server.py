from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from axolotl import failpoints
from axolotl.core.trainers.grpo.generation.server import ServerBackend
from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow
from axolotl.errors import ServerError
from axolotl.serving.wire import Completion, GenerateRequest, Group, Sampling

ROWS = [PromptRow(number, "hello", (1, 2, number), {}) for number in range(3)]


def generate(
    *,
    makers: Sequence[str | None] = ("i1",),
    order: Sequence[int] | None = None,
    log_kept: list[float] | None = None,
    **sampling: Any,
) -> list[tuple[int, CompletionGroup]]:
    """One completion of two tokens a maker, asked for version 4 by a run that the instances i1 and i2 have served.

    order: in which the groups finish.
    """

    def stream(request: GenerateRequest) -> Iterator[Group]:
        assert request.adapter_version == 4
        assert request.prompts == [[1, 2, number] for number in range(len(makers))]
        assert request.seeds == [[11 + number] for number in range(len(makers))]
        item = Completion(ids=[7, 8], logprobs=[-1.0, None], finish_reason="stop", log_kept=log_kept)
        for number in order or range(len(makers)):
            yield Group(index=number, completions=[item], instance_id=makers[number])

    client = cast(Any, SimpleNamespace(stream=stream, instances=frozenset({"i1", "i2"})))
    rows, seeds = ROWS[: len(makers)], [[11 + number] for number in range(len(makers))]
    return list(ServerBackend(client).generate(rows, seeds, Sampling(max_tokens=2, **sampling), 4))


def only(finished: list[tuple[int, CompletionGroup]]) -> Any:
    ((_, group),) = finished
    (completion,) = group.completions
    return completion


@pytest.mark.parametrize("makers", [["i3"], [None], ["i1", "i3", "i2"]])
def test_another_process_than_those_of_the_run_is_refused(makers: list[str | None]) -> None:
    with pytest.raises(ServerError, match="does not fit the request") as caught:
        generate(makers=makers)
    assert caught.value.code == "E-SRV-09"


def test_every_completion_names_the_process_that_made_it() -> None:
    """The server was restarted in the middle of the request."""
    finished = generate(makers=["i1", "i1", "i2"])
    assert [group.completions[0].instance_id for _, group in finished] == ["i1", "i1", "i2"]
    assert {group.completions[0].adapter_version for _, group in finished} == {4}


def test_groups_come_as_they_finish_and_say_which_they_are() -> None:
    finished = generate(makers=["i1", "i2", "i1"], order=[2, 0, 1])
    assert [place for place, _ in finished] == [2, 0, 1]
    assert [group.row for _, group in finished] == [ROWS[2], ROWS[0], ROWS[1]]


def test_the_kept_mass_is_put_back_and_what_is_unknown_stays_unknown() -> None:
    completion = only(generate(log_kept=[-0.5, -0.25], top_p=0.5))
    assert completion.logprobs[0] == -1.5 and completion.logprobs[1] != completion.logprobs[1]
    assert not completion.is_renormalised


@pytest.mark.parametrize(
    ("sampling", "is_renormalised"),
    [
        ({}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"structured_regex": "[0-9]"}, True),
        ({"extra": {"allowed_token_ids": [7, 8]}}, True),
        ({"extra": {"stop_token_ids": [8]}}, False),
    ],
)
def test_filters_without_a_kept_mass_are_marked(sampling: dict[str, Any], is_renormalised: bool) -> None:
    assert only(generate(**sampling)).is_renormalised == is_renormalised


@pytest.mark.parametrize(("point", "num_groups"), [("gen.partial", 1), ("gen.received", 3)])
def test_failpoints_are_behind_each_group_and_behind_all(point: str, num_groups: int) -> None:
    finished: list[CompletionGroup] = []

    def take() -> None:
        for _, group in ServerBackend(client).generate(ROWS, [[1], [2], [3]], Sampling(max_tokens=1), 4):
            finished.append(group)

    client = cast(Any, SimpleNamespace(stream=lambda request: (group for group in groups), instances=frozenset({"i1"})))
    item = Completion(ids=[7], logprobs=[-1.0], finish_reason="stop")
    groups = [Group(index=number, completions=[item], instance_id="i1") for number in range(3)]
    failpoints.arm({failpoints.VARIABLE: f"{point}=raise:RuntimeError"})
    try:
        with pytest.raises(RuntimeError, match=failpoints.VARIABLE):
            take()
    finally:
        failpoints.arm({})
    assert len(finished) == num_groups
