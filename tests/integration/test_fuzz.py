"""A short form of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.fuzz import run_on_tiny_model

pytestmark = pytest.mark.integration

COUNT = 300


def test_requests_that_are_almost_right_do_no_harm(tmp_path: Path) -> None:
    summary = run_on_tiny_model(tmp_path, COUNT, seed=300)
    assert not summary.problems, "\n".join(summary.problems)
    assert summary.count == COUNT and summary.num_checks == COUNT // 25
    answered = {status for status in summary.statuses if status}
    assert {200, 400, 401, 403, 404, 405, 409, 415, 422} <= answered, "every way to refuse was met"
    assert summary.kinds.keys() >= {"valid", "values", "bytes", "headers", "method", "path", "cut", "garbage"}
