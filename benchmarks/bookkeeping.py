"""What ledger, journal and metrics cost: the share of a step's time that they take.

    python benchmarks/bookkeeping.py [--steps N] [--threads N] [--directory DIR] [--model DIR]

One run, in which every second step goes without: bookkeeping has no switch, so this script makes the functions that do
it return at once. `on` and `off` are the medians of the two kinds of steps, the first of each left out. What a busy
machine does to a step is more than their difference, so the time inside these functions is measured as well, and the
last line, and the exit code, are about that. Lines of the journal are waited for until they are on the disk: give a DIR
on the one that a run would write to.

The model and the step are the quickstart's (48 completions of up to 10 tokens), generated in process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.02


@dataclass
class Meter:
    """The step that runs: whether bookkeeping is on, and the seconds spent in it. on, off: `(step, bookkeeping)` of
    finished steps."""

    is_on: bool = True
    seconds: float = 0.0
    began: float = 0.0
    by_part: dict[str, float] = field(default_factory=dict)
    on: list[tuple[float, float]] = field(default_factory=list)
    off: list[tuple[float, float]] = field(default_factory=list)

    def next_step(self) -> None:
        now = time.perf_counter()
        if self.began:
            (self.on if self.is_on else self.off).append((now - self.began, self.seconds))
            self.is_on = not self.is_on
        self.began, self.seconds = now, 0.0

    def metered(self, owner: type, name: str, instead: Callable[[], Any]) -> None:
        """Have `owner.name` counted while bookkeeping is on; otherwise it returns what `instead` does."""
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return instead()
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.seconds += took
                label = f"{owner.__name__}.{name}"
                self.by_part[label] = self.by_part.get(label, 0.0) + took

        setattr(owner, name, call)


def prepare(directory: Path, model: Path | None, steps: int) -> None:
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from sync_latency import quickstart_model

    from tests.support.project import make_project

    make_project(
        directory,
        model or quickstart_model(),
        num_questions=48,
        lora_r=16,
        lora_alpha=32,
        chat_template="tokenizer_default",
        trl__num_generations=8,
        trl__max_completion_length=10,
        micro_batch_size=24,
        gradient_accumulation_steps=2,
        learning_rate=2e-4,
        max_steps=steps,
    )


def measure(directory: Path, steps: int, threads: int) -> Meter:
    import torch
    from transformers import TrainerCallback

    from axolotl.cli import train
    from axolotl.cli.main import main
    from axolotl.core.run.journal import JournalFile
    from axolotl.core.run.metrics_file import MetricsFile
    from axolotl.core.trainers.grpo.ledger import Counts
    from axolotl.core.trainers.grpo.pipeline import OpenStep, RolloutPipeline
    from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

    torch.set_num_threads(threads)
    meter = Meter()
    meter.metered(OpenStep, "_account", Counts)
    meter.metered(RolloutPipeline, "describe", dict)
    meter.metered(AxolotlGRPOTrainer, "_record", lambda: None)
    meter.metered(AxolotlGRPOTrainer, "_record_sampling", lambda: torch.zeros(0, dtype=torch.bool))
    meter.metered(JournalFile, "on_step_end", lambda: None)
    meter.metered(MetricsFile, "on_log", lambda: None)

    class Clock(TrainerCallback):
        """A step with all that is done at its end: from one beginning to the next."""

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            meter.next_step()

        def on_train_end(self, *args: object, **kwargs: object) -> None:
            meter.next_step()

    build = train._build

    def timed(*parts: Any) -> AxolotlGRPOTrainer:
        trainer = build(*parts)
        trainer.add_callback(Clock())
        return trainer

    train._build = timed
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    assert main(["train", "config.yaml"]) == 0
    return meter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of each kind")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--directory", type=Path, help="where the run is written; a temporary one if not given")
    parser.add_argument("--model", type=Path, help="another than the quickstart's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="axolotl-bench-", dir=arguments.directory) as scratch:
        directory = Path(scratch)
        prepare(directory, arguments.model, 2 * arguments.steps + 2)
        meter = measure(directory, 2 * arguments.steps + 2, arguments.threads)
    on, off = meter.on[1:], meter.off[1:]
    for label, seconds in sorted(meter.by_part.items(), key=lambda item: -item[1]):
        print(f"{label:36} {1e3 * seconds / len(meter.on):7.2f} ms a step")
    for name, steps in (("on", on), ("off", off)):
        print(f"{name:4} median {statistics.median(step for step, _ in steps):.3f} s of {len(steps)} steps")
    share = statistics.median(seconds / step for step, seconds in on)
    verdict = "passed" if share < LIMIT else "FAILED"
    print(f"{verdict}: bookkeeping is {share:.2%} of a step (median of {len(on)}; limit {LIMIT:.0%})")
    return 0 if share < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
