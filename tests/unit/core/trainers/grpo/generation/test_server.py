from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from axolotl.core.trainers.grpo.generation.server import ServerBackend
from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow
from axolotl.errors import ServerError
from axolotl.serving.wire import Completion, GenerateRequest, GenerateResponse, Group, Sampling

ROW = PromptRow(0, "hello", (1, 2, 3), {})


def generate(
    *,
    version: int = 4,
    instance: str = "i2",
    makers: Sequence[str | None] = (None,),
    log_kept: list[float] | None = None,
    **sampling: Any,
) -> list[CompletionGroup]:
    """One completion of two tokens a maker, from a server that answers with these, asked for version 4 by a run that
    the instances i1 and i2 have served."""

    def answer(request: GenerateRequest) -> GenerateResponse:
        assert (request.adapter_version, request.prompts) == (4, [[1, 2, 3]] * len(makers))
        item = Completion(ids=[7, 8], logprobs=[-1.0, None], finish_reason="stop", log_kept=log_kept)
        groups = [Group(index=n, completions=[item], instance_id=maker) for n, maker in enumerate(makers)]
        return GenerateResponse(
            request_id=request.request_id, instance_id=instance, adapter_version=version, groups=groups
        )

    client = cast(Any, SimpleNamespace(generate=answer, instances=frozenset({"i1", "i2"})))
    backend = ServerBackend(client, cast(Any, SimpleNamespace(version=4)))
    return backend.generate([ROW] * len(makers), [[11]] * len(makers), Sampling(max_tokens=2, **sampling))


@pytest.mark.parametrize(
    "wrong", [{"version": 3}, {"version": 0}, {"version": 5}, {"instance": "i3"}, {"makers": ["i1", "i3", "i2"]}]
)
def test_another_version_or_process_than_asked_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="does not fit the request") as caught:
        generate(**wrong)
    assert caught.value.code == "E-SRV-09"


def test_every_completion_names_the_process_that_made_it() -> None:
    """The server was restarted in the middle of the request."""
    groups = generate(makers=["i1", "i1", "i2", None])
    assert [group.completions[0].instance_id for group in groups] == ["i1", "i1", "i2", "i2"]
    assert {group.completions[0].adapter_version for group in groups} == {4}


def test_the_kept_mass_is_put_back_and_what_is_unknown_stays_unknown() -> None:
    (completion,) = generate(log_kept=[-0.5, -0.25], top_p=0.5)[0].completions
    assert completion.logprobs is not None
    assert completion.logprobs[0] == -1.5 and completion.logprobs[1] != completion.logprobs[1]
    assert not completion.is_renormalised


@pytest.mark.parametrize(
    ("sampling", "is_renormalised"), [({}, False), ({"top_p": 0.9}, True), ({"top_k": 5}, True), ({"min_p": 0.1}, True)]
)
def test_filters_without_a_kept_mass_are_marked(sampling: dict[str, Any], is_renormalised: bool) -> None:
    (completion,) = generate(**sampling)[0].completions
    assert completion.is_renormalised == is_renormalised
