"""How near prefetching and streaming come to the shortest step that is possible: generation and training at once.

    python benchmarks/overlap.py [--rounds N] [--groups M] [--ratios R ...] [--output PICTURE.png]

One run of one trainer. The server sleeps instead of computing (stub_server.py), from 0.25 to 4 times as long as
training takes, which is measured first and all along; HTTP, threads, scoring, training and the push of the adapter are
real.
With g seconds of generation, t of training and w that a push blocks, in M chunks of one group, a step takes at least

    prefetch    max(g, t) + w                    while step k is trained, k + 1 is made
    streaming   max(g + t/M, g/M + t) + w        a group is trained as soon as it is there

Each round compares the median of its steps with the limit that follows from training alone just before and just after
them, because a machine is not equally fast all the time; a ratio is the median over the rounds. The last line is the
worst one; the exit code is 1 when it is above 1.2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}.items():
    os.environ.setdefault(name, value)

from stub_server import DELAY, stub_server  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer  # noqa: E402
from axolotl.core.trainers.grpo.rollout.making import GroupMaker  # noqa: E402
from axolotl.core.trainers.grpo.rollout.planning import Planner  # noqa: E402
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer  # noqa: E402
from axolotl.core.trainers.grpo.specs import StepSpec  # noqa: E402

if TYPE_CHECKING:
    from axolotl.core.trainers.grpo.pipeline import RolloutPipeline
    from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

Schedule = Literal["synchronous", "prefetch", "streaming"]
MEASURED: tuple[Schedule, ...] = ("prefetch", "streaming")
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
ALLOWED = 1.2
# Half a second of training on one core, so that what Python does beside it is small.
GROUP_SIZE, PROMPT, COMPLETION, LAYERS = 4, 16, 64, 6
LOSS = "dapo"


@dataclass(frozen=True)
class Block:
    """Steps from `first` to before `end` of one schedule, with generation `ratio` times as long as training. The first
    of them is not counted: nothing was made ahead of it."""

    schedule: Schedule
    ratio: float
    first: int
    end: int


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step: all of it, what the push blocked, what it waited for completions."""

    block: Block
    seconds: float
    sync: float
    waited: float
    generation: float

    @property
    def training(self) -> float:
        return self.seconds - self.sync - self.waited


@dataclass(frozen=True)
class Round:
    """The steps of one block, medians in seconds, and the shortest step that was possible then."""

    generation: float
    training: float
    measured: float
    limit: float

    @property
    def over(self) -> float:
        return self.measured / self.limit


@dataclass(frozen=True)
class Row:
    """A schedule at one ratio: seconds of its shortest and its longest step, and its rounds."""

    schedule: Schedule
    ratio: float
    lowest: float
    highest: float
    rounds: Sequence[Round]

    def median(self, name: str) -> float:
        """Over the rounds, of one of their numbers."""
        return statistics.median(getattr(each, name) for each in self.rounds)


def shortest(schedule: Schedule, g: float, t: float, w: float, chunks: int) -> float:
    """The bound of a step, in seconds."""
    match schedule:
        case "synchronous":
            return g + t + w
        case "prefetch":
            return max(g, t) + w
        case "streaming":
            return max(g + t / chunks, g / chunks + t) + w


def plan(rounds: int, ratios: Sequence[float]) -> list[Block]:
    """Training time first; then, in every round and at every ratio, the schedules to be measured and it again."""
    lengths: list[tuple[Schedule, float, int]] = [("synchronous", 0.0, 6)]
    for _ in range(rounds):
        for ratio in ratios:
            lengths += [("prefetch", ratio, 4), ("streaming", ratio, 4), ("synchronous", 0.0, 4)]
    blocks, first = [], 0
    for schedule, ratio, count in lengths:
        blocks.append(Block(schedule, ratio, first, first + count))
        first += count
    return blocks


class Arms(TrainerCallback):
    """Gives the trainer the pipeline of each block when it begins, and takes the times of its steps."""

    def __init__(self, blocks: Sequence[Block], groups: int) -> None:
        self.blocks = list(blocks)
        self.groups = groups
        self.steps: list[Step] = []
        self.trainer: AxolotlGRPOTrainer | None = None
        self._maker: GroupMaker | None = None
        self._began = self._generation = 0.0

    def producer(self, maker: GroupMaker) -> SyncProducer:
        """The trainer's own, which no block uses."""
        self._maker = maker
        return SyncProducer(maker)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        assert trainer is not None
        if state.global_step == self.blocks[0].end:
            del self.blocks[0]
        if state.global_step == self.blocks[0].first:
            trainer.pipeline.producer.close()
            trainer.pipeline = self._pipeline(trainer.pipeline, self.blocks[0])
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._began
        block = self.blocks[0]
        assert self.trainer is not None and self.trainer.last_step is not None
        metrics = self.trainer.last_step[0].metrics
        if state.global_step > block.first + 1:
            times = (metrics["time/sync"], metrics["time/generate"])
            self.steps.append(Step(block, seconds, *times, self._generation))
        if sys.stderr.isatty():
            print(f"\rstep {state.global_step} of {state.max_steps}", end="", file=sys.stderr, flush=True)

    def _pipeline(self, pipeline: RolloutPipeline, block: Block) -> RolloutPipeline:
        self._generation = block.ratio * self._training() if block.ratio else 0.0
        assert self._maker is not None
        sampling = self._maker.sampling.model_copy(update={"extra": {DELAY: self._generation}})
        maker = replace(self._maker, sampling=sampling)
        return replace(
            pipeline,
            spec=step_spec(self.groups, is_streaming=block.schedule == "streaming"),
            planner=Planner(pipeline.planner.sampler, block.end),
            producer=BackgroundProducer(maker.make, depth=int(block.schedule == "prefetch")),
        )

    def _training(self) -> float:
        """Of the last two blocks that measured it."""
        times = [step.training for step in self.steps if step.block.schedule == "synchronous"]
        return statistics.median(times[-6:])


def step_spec(groups: int, *, is_streaming: bool) -> StepSpec:
    """A micro-batch is a group in every schedule, so that all of them train alike."""
    spec = StepSpec(GROUP_SIZE, LOSS)
    rows = groups * GROUP_SIZE
    if not is_streaming:
        return spec
    return replace(
        spec, groups_per_chunk=1, trains_early=True, rows_per_step=rows, token_estimate=rows * COMPLETION / 2
    )


def run(rounds: int, groups: int, ratios: Sequence[float], directory: Path) -> list[Step]:
    import torch

    from tests.support.recorded import arguments, tiny_policy
    from tests.support.served import claimed, served_trainer
    from tests.support.tiny_model import make_tiny_model

    torch.set_num_threads(1)
    model, tokenizer = tiny_policy(
        make_tiny_model(directory / "model", hidden_size=192, intermediate_size=768, num_hidden_layers=LAYERS)
    )
    blocks = plan(rounds, ratios)
    arms = Arms(blocks, groups)
    args = arguments(
        directory / "output",
        per_device_train_batch_size=groups * GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=COMPLETION,
        max_steps=blocks[-1].end,
        logging_strategy="no",
        loss_type=LOSS,
        beta=0.0,
    )
    with stub_server(directory, num_modules=2 * LAYERS) as url, claimed(url, directory) as client:
        arms.trainer = served_trainer(
            model,
            tokenizer,
            args,
            client,
            directory,
            prompts=[tuple((index + position) % 100 for position in range(PROMPT)) for index in range(2 * groups)],
            spec=step_spec(groups, is_streaming=False),
            prompts_per_step=groups,
            make_producer=arms.producer,
        )
        arms.trainer.add_callback(arms)
        arms.trainer.train()
        arms.trainer.pipeline.close()
    return arms.steps


def table(steps: Sequence[Step], groups: int) -> list[Row]:
    rows = []
    for schedule, ratio in sorted({(s.block.schedule, s.block.ratio) for s in steps if s.block.schedule in MEASURED}):
        own = [step for step in steps if (step.block.schedule, step.block.ratio) == (schedule, ratio)]
        seconds = [step.seconds for step in own]
        rounds = [
            measured([step for step in own if step.block == block], steps, groups)
            for block in dict.fromkeys(step.block for step in own)
        ]
        rows.append(Row(schedule, ratio, min(seconds), max(seconds), rounds))
    return rows


def measured(own: Sequence[Step], steps: Sequence[Step], groups: int) -> Round:
    """The steps of one block against what the blocks of training alone around it allow."""
    block = own[0].block
    t = statistics.median(step.training for step in around(steps, block))
    g = statistics.median(step.generation for step in own)
    w = statistics.median(step.sync for step in own)
    seconds = statistics.median(step.seconds for step in own)
    return Round(g, t, seconds, shortest(block.schedule, g, t, w, groups))


def around(steps: Sequence[Step], block: Block) -> Iterator[Step]:
    """The steps that measured training alone, last before `block` and first after it."""
    alone = [step for step in steps if step.block.schedule == "synchronous"]
    before = max((step.block.first for step in alone if step.block.end <= block.first), default=-1)
    after = min((step.block.first for step in alone if step.block.first >= block.end), default=-1)
    yield from (step for step in alone if step.block.first in (before, after))


def report(rows: Sequence[Row], groups: int) -> float:
    """Print the table; returns the worst ratio."""
    names = ("generation", "training", "measured", "min", "max", "limit", "measured / limit")
    widths = [max(len(name), 7) + 2 for name in names]
    print(f"{f'{groups} groups a step; seconds':<28}" + "".join(map(str.rjust, names, widths)))
    for row in rows:
        g, t, seconds, limit, over = map(row.median, ("generation", "training", "measured", "limit", "over"))
        values = (g, t, seconds, row.lowest, row.highest, limit, over)
        cells = (f"{value:{width}.3f}" for value, width in zip(values, widths, strict=True))
        print(f"  {row.schedule:<11} g = {row.ratio:4.2f} t   " + "".join(cells))
    return max(row.median("over") for row in rows)


def draw(rows: Sequence[Row], groups: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    ratios = [RATIOS[0] * (RATIOS[-1] / RATIOS[0]) ** (index / 200) for index in range(201)]
    colours: dict[Schedule, str] = {"synchronous": "tab:grey", "prefetch": "tab:blue", "streaming": "tab:orange"}
    for schedule, colour in colours.items():
        limits = [shortest(schedule, ratio, 1.0, 0.0, groups) for ratio in ratios]
        axes.plot(ratios, limits, color=colour, linewidth=1, label=f"{schedule}, limit")
        own = [row for row in rows if row.schedule == schedule]
        if own:
            axes.plot(
                [row.ratio for row in own],
                [row.median("measured") / row.median("training") for row in own],
                "o",
                color=colour,
                label=f"{schedule}, measured",
            )
    axes.set(xscale="log", yscale="log", xlabel="generation / training", ylabel="step / training")
    axes.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
    axes.set_yticks([1, 2, 3, 4, 5], ["1", "2", "3", "4", "5"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="of generation to training")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "overlap.png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="axolotl-bench-") as directory:
        steps = run(arguments.rounds, arguments.groups, arguments.ratios, Path(directory))
    rows = table(steps, arguments.groups)
    worst = report(rows, arguments.groups)
    draw(rows, arguments.groups, arguments.output)
    print(f"picture: {arguments.output}")
    print(f"worst ratio {worst:.3f}")
    sys.exit(worst > ALLOWED)


if __name__ == "__main__":
    main()
