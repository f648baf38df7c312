"""A short form of `make soak`, and the arithmetic of its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.soak import Report, Sample, run_on_tiny_model

pytestmark = pytest.mark.integration


def test_nothing_piles_up_over_sixty_syncs_under_load(tmp_path: Path) -> None:
    report = run_on_tiny_model(tmp_path, 60)
    assert not report.problems(with_memory=False), report
    assert len(report.samples) > 40
    assert all(sample.versions <= 3 for sample in report.samples)


def report_of(memory: list[int], files: list[int]) -> Report:
    samples = [Sample(10 * index, m, f, 3, 2, 2) for index, (m, f) in enumerate(zip(memory, files, strict=True))]
    return Report(num_syncs=0, samples=samples)


def test_a_leak_of_two_megabytes_in_a_hundred_syncs_is_found_and_a_spike_is_none() -> None:
    steady = report_of([100, 100, 10_000_000, 100, 100], [5] * 5)
    assert steady.memory_slope == 0 and not steady.problems(with_memory=True)
    leaking = report_of([index * 200_000 for index in range(5)], [5] * 5)
    assert leaking.memory_slope == 2_000_000
    assert [problem.split(":")[0] for problem in leaking.problems(with_memory=True)] == ["memory"]
    assert not leaking.problems(with_memory=False)


def test_one_open_file_more_is_found() -> None:
    assert report_of([0] * 4, [9, 10, 10, 9]).growth("files") == 0
    assert report_of([0] * 4, [9, 10, 10, 11]).problems(with_memory=False) == ["files: [9, 10, 10, 11]"]
