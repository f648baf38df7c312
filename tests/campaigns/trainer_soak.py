"""Thousands of steps of one training run, watched from outside: does anything pile up in the trainer?

    python -m tests.campaigns.soak --syncs 0 --steps 2000

All that keeps something from step to step is on: prefetching, replay, re-roll, checkpoints, journal. Samples begin when
a fifth of the steps is done. Everything is judged by the slope of `slope.py`: files and threads come and go with
requests and saves, and what alternates is as often equal as not, so that only what goes on growing has one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.campaigns.slope import slope_per_100
from tests.campaigns.trainer_chaos import Ground, ground
from tests.support.forked import forked
from tests.support.tiny_model import make_tiny_model

MAX_SLOPE = 1 << 20
"""Bytes per 100 steps."""
SECONDS_A_STEP = 3.0
"""At most, on a busy machine."""
NUM_SAMPLES = 100
COUNTED = ("files", "threads", "temporaries")


@dataclass(frozen=True)
class Sample:
    """The trainer after `step` steps: private memory in bytes, open files, threads; and on the disk, what is temporary:
    files below `TMPDIR`, half-written checkpoints, adapters and the directories that hold them."""

    step: int
    memory: int
    files: int
    threads: int
    temporaries: int


@dataclass
class Report:
    """samples: from the end of the warm-up."""

    num_steps: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def memory_slope(self) -> float:
        """Bytes per 100 steps."""
        return slope_per_100([(sample.step, sample.memory) for sample in self.samples])

    def growth(self, name: str) -> float:
        """Of `files`, `threads` or `temporaries`, per 100 steps."""
        return slope_per_100([(sample.step, getattr(sample, name)) for sample in self.samples])

    def problems(self, *, with_memory: bool) -> list[str]:
        found = [
            f"{name}: {[getattr(sample, name) for sample in self.samples]}" for name in COUNTED if self.growth(name) > 0
        ]
        if with_memory and self.memory_slope > MAX_SLOPE:
            found.append(f"memory: {[sample.memory >> 10 for sample in self.samples]} KB")
        return found

    def __str__(self) -> str:
        grown = ", ".join(f"{name} {self.growth(name):+g}" for name in COUNTED)
        return f"{self.num_steps} steps: memory {self.memory_slope / (1 << 20):+.2f} MB per 100 steps, {grown}"


def run(place: Ground, num_steps: int) -> Report:
    """Train `num_steps` steps to the end; fails when the run does."""
    directory = place.project(
        f"soak-{num_steps}",
        "async",
        max_steps=num_steps,
        save_steps=max(num_steps // 20, 1),
        num_questions=64,
        # Slow enough that groups differ in their rewards to the end.
        learning_rate=1e-5,
    )
    temporary = directory / "tmp"
    temporary.mkdir()
    report, every = Report(num_steps), max(num_steps // NUM_SAMPLES, 1)
    deadline = time.monotonic() + 60 + SECONDS_A_STEP * num_steps
    with forked(directory, "train", "config.yaml", TMPDIR=str(temporary)) as training:
        process = psutil.Process(training.pid)
        following = num_steps // 5
        while (code := training.wait(0.05)) is None:
            assert time.monotonic() < deadline, f"too slow: {training.output[-2000:]}"
            step = _num_steps(directory / "out" / "metrics.jsonl")
            # The last steps are a run that comes to its end.
            if following <= step < num_steps - 1:
                report.samples.append(_sample(step, process, directory, place.directory / "sync"))
                following = step + every
        assert code == 0, training.output[-2000:]
    return report


def _num_steps(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _sample(step: int, process: psutil.Process, directory: Path, sync: Path) -> Sample:
    with process.oneshot():
        memory, files, threads = process.memory_full_info().uss, process.num_fds(), process.num_threads()
    left = [*(directory / "tmp").rglob("*"), *(directory / "out").glob(".tmp-*"), *(sync / "adapters").glob("*/*")]
    return Sample(step, memory, files, threads, len(left))


def run_on_tiny_model(directory: Path, num_steps: int) -> Report:
    with ground(directory, make_tiny_model(directory / "model")) as place:
        return run(place, num_steps)
