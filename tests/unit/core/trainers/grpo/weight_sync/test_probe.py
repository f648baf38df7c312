import pytest

from axolotl.core.trainers.grpo.weight_sync.probe import Probe


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
