from __future__ import annotations

from typing import cast

import pytest

from axolotl.core.trainers.grpo.weight_sync.probe import Probe, ServerProbe
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import Completion, GenerateRequest, GenerateResponse, Group


def test_the_tokens_that_follow_the_context_are_scored() -> None:
    probe = Probe.of_prompt(range(100), 2048)
    assert probe == Probe(tuple(range(16)), tuple(range(16, 24)))


def test_a_short_prompt_begins_again() -> None:
    assert Probe.of_prompt([7, 8, 9], 2048) == Probe((7, 8, 9), (7, 8, 9, 7, 8, 9, 7, 8))
    assert Probe.of_prompt([7], 2048) == Probe((7,), (7,) * 8)


@pytest.mark.parametrize("limit", [2, 3, 9, 10, 24])
def test_it_fits_what_the_server_takes(limit: int) -> None:
    probe = Probe.of_prompt(range(100), limit)
    assert len(probe.context) >= 1 and len(probe.tokens) >= 1
    assert len(probe.context) + len(probe.tokens) <= limit


class Client:
    """Notes what it is asked; a log-prob that is not finite travels as null."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def score(self, *asked: object) -> list[list[float]]:
        self.asked.append(asked)
        return [[-1.0, -2.0]]

    def generate(self, request: GenerateRequest) -> GenerateResponse:
        self.asked.append(request)
        drawn = Completion(ids=[9, 8, 7], logprobs=[-0.5, None, -1.5], finish_reason="stop")
        group = Group(index=0, completions=[drawn])
        return GenerateResponse(request_id="r", instance_id="i", adapter_version=3, groups=[group])


def test_the_server_is_asked_for_the_same_tokens_at_the_same_temperature() -> None:
    client = Client()
    probe = ServerProbe(cast(ServerClient, client), Probe((1, 2), (3, 4)), 0.7)
    assert probe.score(5).tolist() == [-1.0, -2.0]
    probe.score(5, (8, 9))
    assert client.asked == [([(1, 2)], [(3, 4)], 0.7, 5), ([(1, 2)], [(8, 9)], 0.7, 5)]


def test_what_it_draws_comes_with_the_log_probs_it_was_drawn_with() -> None:
    client = Client()
    tokens, logps = ServerProbe(cast(ServerClient, client), Probe((1, 2), (3, 4)), 0.7).draw(3)
    assert tokens == (9, 8, 7) and logps[[0, 2]].tolist() == [-0.5, -1.5] and bool(logps[1].isnan())
    (request,) = client.asked
    assert isinstance(request, GenerateRequest)
    assert (request.adapter_version, request.prompts, request.sampling.temperature) == (3, [[1, 2]], 0.7)
    assert request.sampling.max_tokens == 2
