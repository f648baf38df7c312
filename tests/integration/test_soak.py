"""A short form of `make soak`, and the arithmetic of its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import trainer_soak
from tests.campaigns.soak import Report, Sample, run_on_tiny_model

pytestmark = pytest.mark.integration


def test_nothing_piles_up_over_sixty_syncs_under_load(tmp_path: Path) -> None:
    report = run_on_tiny_model(tmp_path, 60)
    assert not report.problems(with_memory=False), report
    assert len(report.samples) > 40


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


@pytest.mark.parametrize(
    ("versions", "directories", "found"),
    [
        ([2, 2, 2, 3, 2, 2], [2, 2, 2, 3, 2, 2], []),
        ([2, 3, 2, 3, 3, 2], [2, 3, 2, 3, 3, 2], []),
        ([2, 3, 2, 3, 3, 3], [2, 3, 2, 3, 3, 3], ["versions", "directories"]),
        ([2, 2, 2, 2, 2, 4], [2, 2, 2, 2, 2, 4], ["after sync 50"]),
        ([2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 3, 2], ["after sync 40"]),
    ],
)
def test_a_third_version_for_a_moment_is_no_growth(
    versions: list[int], directories: list[int], found: list[str]
) -> None:
    held = zip(versions, directories, strict=True)
    report = Report(0, [Sample(10 * index, 0, 5, 3, number, places) for index, (number, places) in enumerate(held)])
    assert [problem.split(":")[0] for problem in report.problems(with_memory=False)] == found


def test_one_open_file_more_is_found() -> None:
    assert report_of([0] * 4, [9, 10, 10, 9]).growth("files") == 0
    assert report_of([0] * 4, [9, 10, 10, 11]).problems(with_memory=False) == ["files: [9, 10, 10, 11]"]


def trainer_report(**columns: list[int]) -> trainer_soak.Report:
    """Of six samples, ten steps apart; what is not given stands still."""
    steady = {"memory": [0] * 6, "files": [9] * 6, "threads": [4] * 6, "temporaries": [2] * 6}
    rows = zip(*{**steady, **columns}.values(), strict=True)
    return trainer_soak.Report(60, [trainer_soak.Sample(10 * number, *row) for number, row in enumerate(rows)])


def test_of_a_training_run_a_leak_is_found_and_what_comes_and_goes_is_none() -> None:
    assert not trainer_report(files=[9, 11, 9, 9, 11, 9], temporaries=[2, 4, 2, 4, 2, 2]).problems(with_memory=True)
    alternating = [int(digit) for digit in "545445444544544444544544555545455555544445"]
    assert not trainer_soak.Report(
        60, [trainer_soak.Sample(12 + number, 0, 9, 4, value) for number, value in enumerate(alternating)]
    ).problems(with_memory=False)
    for name in trainer_soak.COUNTED:
        leaking = trainer_report(**{name: [9, 9, 9, 9, 10, 10]})
        assert [problem.split(":")[0] for problem in leaking.problems(with_memory=False)] == [name]
    leaking = trainer_report(memory=[number * 200_000 for number in range(6)])
    assert leaking.memory_slope == 2_000_000
    assert [problem.split(":")[0] for problem in leaking.problems(with_memory=True)] == ["memory"]
