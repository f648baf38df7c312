"""The budget of restarts, without processes."""

from __future__ import annotations

from pathlib import Path

from axolotl.serving.restarts import Restarts


def test_a_first_start_has_no_second() -> None:
    restarts = Restarts(limit=5)
    assert not restarts.take()
    fault = restarts.refusal("exit code 3", Path("server.log"), ["no model"])
    assert (fault.exit_code, fault.code, fault.details) == (3, "E-ENV-05", ("no model",))
    assert "exit code 3" in fault.what and "server.log" in fault.why


def test_as_many_in_a_row_as_the_limit_says() -> None:
    restarts = Restarts(limit=2, was_ready=True)
    assert [restarts.take() for _ in range(3)] == [True, True, False]
    fault = restarts.refusal("SIGKILL", Path("server.log"), [])
    assert (fault.exit_code, fault.code) == (6, "E-SRV-24") and "vllm.max_restarts is 2" in fault.why


def test_an_answer_refills() -> None:
    restarts = Restarts(limit=1)
    restarts.served()
    assert restarts.take() and not restarts.take()
    restarts.served()
    assert restarts.take()


def test_pauses_double_from_the_second_on_and_are_bounded() -> None:
    restarts, pauses = Restarts(limit=20, was_ready=True), []
    while restarts.take():
        pauses.append(restarts.pause_s)
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses[-1] == 30.0
