"""Short forms of the benchmarks, and the arithmetic of the one with a limit of its own. What they measure here is no
claim: other tests run beside them.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def run(name: str, *arguments: str) -> str:
    """What the benchmark prints; 1 is its verdict, not a failure."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def overlap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("overlap_benchmark", BENCHMARKS / "overlap.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_overlap_measures_both_schedules_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "overlap.png"
    printed = run("overlap.py", "--rounds", "1", "--groups", "2", "--ratios", "2", "--output", str(picture))
    rows = re.findall(r"(prefetch|streaming) +g = 2\.00 t +([\d. ]+)", printed)
    assert [name for name, _ in rows] == ["prefetch", "streaming"]
    for _, numbers in rows:
        generation, training, median, lowest, highest, limit, over = map(float, numbers.split())
        assert 0 < training < generation < limit and lowest <= median <= highest
        assert over == pytest.approx(median / limit, abs=0.02)
    assert re.fullmatch(r"worst ratio \d+\.\d{3}", printed.splitlines()[-1])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bookkeeping_gives_its_share_of_a_step(tiny_model: Path) -> None:
    printed = run("bookkeeping.py", "--steps", "2", "--threads", "1", "--model", str(tiny_model))
    share = re.search(r"bookkeeping is ([\d.]+)% of a step \(median of 2; limit 2%\)$", printed.strip())
    assert share is not None and 0 < float(share[1]) < 100


def test_sync_latency_splits_a_push(tiny_model: Path) -> None:
    printed = run(
        "sync_latency.py", *["--engine", "transformers", "--pushes", "2", "--threads", "1", "--model"], str(tiny_model)
    )
    found = dict(re.findall(r"^  (save|load|check|wait|held up) +([\d.]+)", printed, re.MULTILINE))
    assert set(found) == {"save", "load", "check", "wait", "held up"}
    assert all(float(found[phase]) > 0 for phase in ("save", "load", "check", "held up"))


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        # Eight groups, 2 s of generation, 1 s of training, 0.1 s of a push.
        ("synchronous", 2 + 1 + 0.1),
        ("prefetch", 2 + 0.1),
        # An eighth of the training is left when the last group is there.
        ("streaming", 2 + 1 / 8 + 0.1),
    ],
)
def test_the_shortest_step(overlap: ModuleType, schedule: str, seconds: float) -> None:
    assert overlap.shortest(schedule, 2.0, 1.0, 0.1, 8) == pytest.approx(seconds)


def test_a_round_is_compared_with_the_training_around_it(overlap: ModuleType) -> None:
    """The machine is half as fast in the second round: 2.2 s of 2 s there are as much as 1.1 s of 1 s in the first."""
    alone, ahead = ("synchronous", 0.0), ("prefetch", 0.5)
    steps = []
    for index, (kind, seconds) in enumerate(
        [(alone, 1.0), (ahead, 1.1), (alone, 1.0), (alone, 2.0), (ahead, 2.2), (alone, 2.0)]
    ):
        block = overlap.Block(*kind, first=index, end=index + 1)
        steps.append(overlap.Step(block, seconds, sync=0.0, waited=0.0, generation=0.5 if kind == ahead else 0.0))
    (row,) = overlap.table(steps, groups=8)
    assert [each.limit for each in row.rounds] == [1.0, 2.0]
    assert row.median("over") == pytest.approx(1.1) and (row.lowest, row.highest) == (1.1, 2.2)
