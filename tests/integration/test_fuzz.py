"""A short form of `make fuzz`, and that it finds what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from axolotl.serving.wire import Completion, Sampling
from tests.campaigns.fuzz import run, run_on_tiny_model
from tests.fakes.engine import FakeEngine
from tests.support.live_server import live_server

pytestmark = pytest.mark.integration

COUNT = 300


def test_requests_that_are_almost_right_do_no_harm(tmp_path: Path) -> None:
    summary = run_on_tiny_model(tmp_path, COUNT, seed=300)
    assert not summary.problems, "\n".join(summary.problems)
    assert summary.count == COUNT and summary.num_checks == COUNT // 25
    answered = {status for status in summary.statuses if status}
    assert {200, 400, 401, 403, 404, 405, 409, 415, 422} <= answered, "every way to refuse was met"
    assert summary.kinds.keys() >= {"valid", "values", "bytes", "headers", "method", "path", "cut", "garbage"}


def test_a_server_that_answers_500_is_found(tmp_path: Path) -> None:
    async def create() -> FakeEngine:
        engine = FakeEngine()
        engine.vocab_size = 384
        engine.fault = RuntimeError("broken")
        return engine

    with live_server(tmp_path, create) as server:
        summary = run(server, COUNT, seed=1)
    assert any("answered 500 to [b'POST /generate/" in problem for problem in summary.problems)


class Forgetful(FakeEngine):
    """Answers the same request differently the second time."""

    def _completion(self, seed: int, sampling: Sampling, version: int) -> Completion:
        return super()._completion(seed + self.work, sampling, version)


def test_a_server_that_answers_wrongly_is_found(tmp_path: Path) -> None:
    async def create() -> FakeEngine:
        return Forgetful()

    with live_server(tmp_path, create) as server:
        summary = run(server, 50, seed=1)
    assert [problem.split(":")[0] for problem in summary.problems] == ["request 25", "request 50"]
