from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.rewards.function import RewardFunction
from axolotl.core.trainers.grpo.rewards.inline import InlineRewards
from axolotl.core.trainers.grpo.types import RewardRequest
from axolotl.errors import Interrupted, RewardError

STATE = object()
REQUEST = RewardRequest(
    prompts=[[{"role": "user", "content": "1+1?"}]] * 2 + [[{"role": "user", "content": "2+3?"}]] * 2,
    completions=[[{"role": "assistant", "content": text}] for text in ("2", "3", "5", "")],
    completion_ids=[[4], [5], [6], [7, 8]],
    columns={"answer": ["2", "2", "5", "5"], "level": [1, 1, 2, 2]},
    trainer_state=STATE,
)


def run(*functions: Any) -> InlineRewards:
    return InlineRewards([RewardFunction(f"rewards.f{i}", f"f{i}", f, "rewards.py") for i, f in enumerate(functions)])


def accuracy(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [1.0 if c[0]["content"] == a else 0.0 for c, a in zip(completions, answer, strict=True)]


def shortness(completion_ids: list[list[int]]) -> list[float | None]:
    return [None if len(ids) > 1 else -1.0 for ids in completion_ids]


def test_values_are_one_row_a_completion_and_one_column_a_function() -> None:
    result = run(accuracy, shortness).score(REQUEST)
    assert result.values.dtype == torch.float32
    nan = float("nan")
    expected = torch.tensor([[1.0, -1.0], [0.0, -1.0], [1.0, -1.0], [0.0, nan]])
    torch.testing.assert_close(result.values, expected, equal_nan=True)
    assert result.extra == {} and result.metrics == {}


def test_a_function_gets_everything_of_the_contract() -> None:
    seen: dict[str, Any] = {}

    def look(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 4

    run(look).score(REQUEST)
    assert set(seen) == {
        "prompts", "completions", "completion_ids", "answer", "level", "trainer_state", "log_extra", "log_metric",
    }  # fmt: skip
    assert seen["prompts"] == REQUEST.prompts and seen["completions"] == REQUEST.completions
    assert seen["completion_ids"] == REQUEST.completion_ids and seen["level"] == [1, 1, 2, 2]
    assert seen["trainer_state"] is STATE


def test_what_functions_log_comes_back() -> None:
    def logs(completions: list[Any], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("length", [len(c[0]["content"]) for c in completions])
        log_metric("parsed", 0.75)
        log_metric("parsed", torch.tensor(0.25))
        return [0.0] * 4

    result = run(logs).score(REQUEST)
    assert result.extra == {"length": [1, 1, 1, 0]}
    assert result.metrics == {"parsed": [0.75, 0.25]}


def test_a_function_that_empties_its_lists_harms_no_other() -> None:
    def greedy(completions: list[Any], answer: list[str]) -> list[float]:
        completions.clear()
        answer.clear()
        return [0.0] * 4

    assert run(greedy, accuracy).score(REQUEST).values[:, 1].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert len(REQUEST.completions) == 4


def test_async_functions_run_together() -> None:
    arrived = []

    def meeting(name: str) -> Any:
        async def function(completions: list[Any]) -> list[float]:
            arrived.append(name)
            async with asyncio.timeout(5):
                while len(arrived) < 2:
                    await asyncio.sleep(0)
            return [float(len(arrived))] * len(completions)

        return function

    assert run(meeting("a"), accuracy, meeting("b")).score(REQUEST).values[0].tolist() == [2.0, 1.0, 2.0]


def test_names_are_those_of_the_functions() -> None:
    runner = run(accuracy, shortness)
    assert runner.names == ("f0", "f1")
    runner.close()


def test_an_exception_names_function_line_and_columns() -> None:
    def needs_more(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(kwargs["truth"][0])]

    line = needs_more.__code__.co_firstlineno + 1
    with pytest.raises(RewardError) as caught:
        run(accuracy, needs_more).score(REQUEST)
    error = caught.value
    assert error.code == "E-RWD-02" and error.exit_code == 5
    assert error.what == f"rewards.f1 raised KeyError: 'truth' (test_inline.py:{line})"
    assert error.why == "columns passed: answer, level"
    assert "remove_columns" in error.do
    assert any(f'test_inline.py", line {line}' in text for text in error.details)
    assert not any('inline.py", line' in text and "test_" not in text for text in error.details)


async def raises_async(completions: list[Any]) -> list[float]:
    raise ValueError("judge is down")


def leaves(completions: list[Any]) -> list[float]:
    sys.exit("enough")


async def leaves_async(completions: list[Any]) -> list[float]:
    sys.exit("enough")


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (raises_async, "rewards.f0 raised ValueError: judge is down (test_inline.py:"),
        (leaves, "rewards.f0 raised SystemExit: enough (test_inline.py:"),
        (leaves_async, "rewards.f0 raised SystemExit: enough (test_inline.py:"),
    ],
)
def test_async_failures_and_exits_are_the_functions_errors_too(function: Any, what: str) -> None:
    with pytest.raises(RewardError) as caught:
        run(function).score(REQUEST)
    assert caught.value.code == "E-RWD-02" and caught.value.what.startswith(what)


def test_what_a_function_returns_is_checked() -> None:
    with pytest.raises(RewardError, match=r"rewards\.f0 returned 1 value for 4 completions") as caught:
        run(lambda completions: [1.0]).score(REQUEST)
    assert caught.value.code == "E-RWD-01"


def test_a_keyboard_interrupt_is_left_alone() -> None:
    def interrupted(completions: list[Any]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted).score(REQUEST)


def stopped(completions: list[Any]) -> list[float]:
    raise Interrupted("stop", signal_number=15)


async def stopped_async(completions: list[Any]) -> list[float]:
    raise Interrupted("stop", signal_number=15)


@pytest.mark.parametrize("function", [stopped, stopped_async])
def test_an_interruption_is_not_the_functions_fault(function: Any) -> None:
    runner = run(function)
    with pytest.raises(Interrupted):
        runner.score(REQUEST)
    runner.close()


def test_what_an_async_function_opened_serves_later_calls() -> None:
    loops = []
    opened: list[asyncio.Queue[float]] = []

    async def asks(completions: list[Any]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        if not opened:
            opened.append(asyncio.Queue())
        # A queue is bound to the loop in which something first waited for it.
        waiting = asyncio.ensure_future(opened[0].get())
        await asyncio.sleep(0)
        opened[0].put_nowait(1.0)
        return [await waiting] * len(completions)

    runner = run(asks)
    for _ in range(2):
        assert runner.score(REQUEST).values[:, 0].tolist() == [1.0] * 4
    assert loops[0] is loops[1]
    runner.close()
    assert loops[0].is_closed()


def test_a_logged_column_has_one_value_a_completion() -> None:
    def logs(completions: list[Any], log_extra: Any) -> list[float]:
        log_extra("parsed", [1, 2, 3])
        return [0.0] * 4

    with pytest.raises(RewardError) as caught:
        run(logs).score(REQUEST)
    assert caught.value.what == "log_extra: column 'parsed' has 3 values for 4 completions"


def test_a_batch_without_any_reward_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    def silent(completions: list[Any]) -> list[None]:
        return [None] * len(completions)

    rewards = run(silent, silent)
    for _ in range(2):
        rewards.score(REQUEST)
    error = capsys.readouterr().err
    assert error.count("warning:") == 1 and "rewards.f0, rewards.f1" in error and "all 4 completions" in error
    run(silent, shortness).score(REQUEST)
    assert capsys.readouterr().err == ""
