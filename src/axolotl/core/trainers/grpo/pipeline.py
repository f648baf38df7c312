"""One optimizer step's way from prompts to micro-batches: sync, order, collect, score, cut.

    is a push due? ─► WeightSync.push(version)
    DataProducer.place(the order of step + depth)
    DataProducer.groups ─► Scorer.score ─► split into micro-batches        chunk by chunk when streaming

Main thread, every rank. The parts are chosen in `assembly.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from axolotl.core.trainers.grpo.algo.shares import TOKEN_LOSSES
from axolotl.core.trainers.grpo.distributed import World
from axolotl.core.trainers.grpo.ledger import Counts, Facts, Ledger, tally
from axolotl.core.trainers.grpo.metrics import StepSample, completion_metrics, reward_metrics, staleness_metrics
from axolotl.core.trainers.grpo.microbatch import (
    MicroBatch,
    StepTotals,
    num_counted,
    rows_with_signal,
    shortest_row,
    split,
)
from axolotl.core.trainers.grpo.protocols import DataProducer, WeightSync
from axolotl.core.trainers.grpo.replaying import Replay, with_logps
from axolotl.core.trainers.grpo.rollout.pending_files import Pending, load_pending, save_pending
from axolotl.core.trainers.grpo.rollout.planning import Planner
from axolotl.core.trainers.grpo.rollout.replay import ReplacedBatch, ReplayGroup, join_replay_metrics
from axolotl.core.trainers.grpo.rollout.replay_files import load_replay, save_replay
from axolotl.core.trainers.grpo.rollout.reroll import reroll_metrics
from axolotl.core.trainers.grpo.scoring import Collate, RewardedBatch, ScoredBatch, Scorer, TrainedBatch, join
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow, RolloutBatch, Slot
from axolotl.core.trainers.grpo.weight_sync.schedule import is_due, version_of
from axolotl.errors import Interrupted, SyncError

_REROLL = "reroll.json"
_LEDGER = "ledger.json"


@dataclass
class Part:
    """A chunk of a step. scored: its own groups. trained: what stands for them in training. logps: `[c]` by row of
    `trained`, under the policy of the step, where they are kept."""

    scored: ScoredBatch
    trained: TrainedBatch
    fresh: list[ReplayGroup] = field(default_factory=list)
    replaced: ReplacedBatch | None = None
    logps: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """What became of an optimizer step's rollouts.

    gradient_scale: what the gradients have to be multiplied with, and the loss: the micro-batches were divided by a
    number of tokens that was not known yet. counts: what became of this rank's completions. parts: what was trained.
    """

    scored: ScoredBatch
    metrics: dict[str, float]
    gradient_scale: float = 1.0
    counts: Counts = field(default_factory=Counts)
    parts: tuple[Part, ...] = ()


@dataclass
class Books:
    """What became of the completions of all steps so far."""

    ledger: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True)
class RolloutPipeline:
    """The parts of a run, joined. Made by `assembly.py`."""

    spec: StepSpec
    planner: Planner
    producer: DataProducer
    scorer: Scorer
    collate: Collate
    sync: WeightSync
    accelerator: Accelerator
    world: World = field(default_factory=World)
    replay: Replay | None = None
    rows: Sequence[PromptRow] = ()
    books: Books = field(default_factory=Books)
    _resumed: list[Pending] = field(default_factory=list)

    def open(self, step: int) -> OpenStep:
        """Bring the generator up to date, order what later steps need, and begin optimizer step `step` (from 0)."""
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        began = False
        if is_due(step, self.sync.version, self.spec.sync_interval):
            self._make_way()
            self.sync.begin(version_of(step))
            began = True
        ordered = time.perf_counter()
        metrics["time/sync"] = ordered - started
        self._order(step)
        if began:
            # The server generates meanwhile.
            self.sync.settle()
            metrics |= self.sync.metrics
        return OpenStep(self, step, metrics, ordered)

    def evaluate(self, groups: Sequence[CompletionGroup]) -> tuple[list[MicroBatch], StepResult]:
        """The same for held-out prompts, whose completions the caller made after `catch_up`."""
        batch = self.collate(groups)
        _require_pushed(batch, self.sync.version)
        scored = self.scorer.compare(self.scorer.score(batch))
        trained = TrainedBatch(scored.batch, scored.advantages)
        return self.cut(trained, self.totals([trained])), StepResult(scored, self.describe(self.sample(scored)))

    def sample(self, scored: ScoredBatch) -> StepSample:
        """Collective: of all ranks."""
        own = StepSample.of(scored.batch, scored.result.values, scored.advantages)
        return StepSample.joined(self.world.gather(own))

    def describe(self, sample: StepSample) -> dict[str, float]:
        return {**completion_metrics(sample), **reward_metrics(self.scorer.rewards.names, sample)}

    def catch_up(self, step: int) -> None:
        """Bring the generator to the weights before optimizer step `step`, whatever the interval."""
        if self.sync.version != version_of(step):
            self._make_way()
            self.sync.push(version_of(step))

    def cut(
        self, trained: TrainedBatch, totals: StepTotals, rows: Sequence[int] | None = None, num_rows: int = 0
    ) -> list[MicroBatch]:
        return split(
            trained,
            totals,
            micro_batch_size=self.spec.micro_batch_size,
            loss_type=self.spec.loss_type,
            mask_truncated=self.spec.mask_truncated,
            device=torch.device(self.accelerator.device),
            rows=rows,
            num_rows=num_rows,
        )

    def totals(self, parts: Sequence[TrainedBatch]) -> StepTotals:
        """Collective: of the step that `parts` make up on this rank."""
        rows = sum(part.batch.num_completions for part in parts)
        own = sum(num_counted(part.batch, mask_truncated=self.spec.mask_truncated) for part in parts)
        tokens = self.world.total(own)
        return StepTotals(rows, tokens / self.world.size, tokens)

    def save_state(self, directory: Path) -> None:
        """What a checkpoint keeps of the pipeline, into `directory`, which exists.

        Orders that are being made are waited for, so that a resumed run trains on the same completions; a signal ends
        the wait, and what was not finished is made anew by the policy of the checkpoint.
        """
        if all(order.version <= self.sync.version for order in self.producer.placed):
            with suppress(Interrupted):
                self.producer.drain()
        save_pending(self.producer, directory, believed=self.sync.version)
        (directory / _LEDGER).write_text(json.dumps(self.books.ledger.as_json()))
        if self.replay is not None:
            save_replay(self.replay.buffer, directory)
        if self.planner.reroll is not None:
            (directory / _REROLL).write_text(json.dumps(self.planner.reroll.queue.state()))

    def load_state(self, directory: Path) -> None:
        """What `save_state` kept. Before the first step of a resumed run."""
        if self.replay is not None:
            kept = load_replay(directory, self.replay.buffer.spec, self.rows)
            self.replay.buffer.restore(kept.groups)
        if self.planner.reroll is not None:
            self.planner.reroll.queue.restore(json.loads((directory / _REROLL).read_text()))
        self._resumed.extend(load_pending(directory, self.rows))
        if (directory / _LEDGER).is_file():
            self.books.ledger = Ledger.from_json(json.loads((directory / _LEDGER).read_text()))

    def close(self) -> None:
        self.producer.close()
        self.scorer.rewards.close()
        self.sync.close()

    def _make_way(self) -> None:
        """What is ordered was promised to the version that a push would replace, where only one is kept."""
        if not self.sync.keeps_versions:
            self.world.together(self.producer.drain)

    def _order(self, step: int) -> None:
        if self._resumed:
            for missing in range(step, self._resumed[0][0].step):
                self.producer.place(self.planner.plan(missing, self.sync.version))
        for order, groups in self._resumed:
            if groups:
                self.producer.adopt(order, groups)
            else:
                self.producer.place(replace(order, version=self.sync.version))
        self._resumed.clear()
        placed = self.producer.placed
        first = placed[-1].step + 1 if placed else step
        for ahead in range(first, min(step + self.producer.depth + 1, max(self.planner.num_steps, step + 1))):
            self.producer.place(self.planner.plan(ahead, self.sync.version))


@dataclass
class OpenStep:
    """An optimizer step in the making. Take all of `micro_batches`, then `result`."""

    pipeline: RolloutPipeline
    step: int
    metrics: dict[str, float]
    ordered: float
    _parts: list[Part] = field(default_factory=list)
    _running: Part | None = None
    _num_replayed: int = 0
    _run_rows: list[tuple[Part, int]] = field(default_factory=list)
    _num_skipped: int = 0
    _slots: tuple[Slot, ...] = ()
    _waited: float = 0.0
    _rewards: float = 0.0

    def micro_batches(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Each with whether it is the step's last, as soon as it can be run."""
        pipeline = self.pipeline
        order = pipeline.producer.placed[0]
        assert order.step == self.step, (order.step, self.step)
        self._slots = order.slots
        parts: Iterable[Part] = self._scored(len(order.slots))
        if pipeline.spec.trains_early:
            totals = self._provisional()
        else:
            parts = list(parts)
            totals = pipeline.totals([part.trained for part in parts])
        num_left = len(order.slots)
        for part in parts:
            num_left -= len(part.scored.batch.groups)
            yield from self._run(part, totals, is_last=num_left == 0)

    def result(self, is_left_out: torch.Tensor) -> StepResult:
        """Collective. The numbers of the step, once all of its micro-batches were run.

        Args:
            is_left_out: `[n]` bool, the completions of the micro-batches in their order that had no part in the loss.
        """
        pipeline, spec = self.pipeline, self.pipeline.spec
        scored = join([part.scored for part in self._parts], pipeline.collate)
        totals = pipeline.totals([part.trained for part in self._parts])
        sample = pipeline.sample(scored)
        metrics = {
            **pipeline.describe(sample),
            **self._learn(scored),
            **staleness_metrics(sample, version_of(self.step)),
            **self.metrics,
            **self._times(float(sample.lengths.sum())),
        }
        if spec.skips_zero_signal:
            metrics["skipped_zero_adv_batches"] = float(self._num_skipped)
        is_rescaled = spec.trains_early and spec.loss_type in TOKEN_LOSSES and totals.all_tokens > 0
        scale = self._provisional().all_tokens / totals.all_tokens if is_rescaled else 1.0
        counts = self._account(is_left_out)
        metrics |= sum(pipeline.world.gather(counts), Counts()).metrics()
        return StepResult(scored, metrics, scale, counts, tuple(self._parts))

    def remember(self, micro_batch: MicroBatch, logps: torch.Tensor) -> None:
        """Keep the log-probs `[n, c]` that the present policy gives the micro-batch that was taken last."""
        replay = self.pipeline.replay
        if replay is not None and not replay.recomputes and self._running is not None:
            rows = zip(micro_batch.rows, logps[: len(micro_batch.rows)].detach().float().cpu(), strict=True)
            self._running.logps.update(rows)

    def _learn(self, scored: ScoredBatch) -> dict[str, float]:
        """Replay and re-roll learn the step's own groups, once all of it is trained."""
        metrics: dict[str, float] = {}
        world = self.pipeline.world
        replay, reroll = self.pipeline.replay, self.pipeline.planner.reroll
        if replay is not None:
            for part in self._parts:
                fresh = part.fresh if replay.recomputes else with_logps(part.fresh, part.trained, part.logps)
                replay.learn(fresh, self.step)
            own = replay.metrics([part.replaced for part in self._parts if part.replaced is not None])
            metrics |= join_replay_metrics(world.gather(own))
        if reroll is not None:
            reroll.learn(scored.batch.groups, scored.advantages.rewards)
            ranks = world.gather(reroll_metrics(reroll.queue, self._slots))
            metrics |= {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        return metrics

    def _account(self, is_left_out: torch.Tensor) -> Counts:
        """Every completion in one class; the sums have to balance."""
        left_out = iter(is_left_out.tolist())
        masked = {(id(part), row) for part, row in self._run_rows if next(left_out, False)}
        counts, num_replayed = Counts(), 0
        for part in self._parts:
            size = part.trained.batch.group_size
            origins = part.replaced.origins if part.replaced is not None else ()
            is_replayed = [origin.is_replayed for origin in origins] or [False] * len(part.trained.batch.groups)
            rows = range(part.trained.batch.num_completions)
            counts += tally(
                Facts(
                    has_signal=part.trained.advantages.has_signal.repeat_interleave(size),
                    is_replayed=torch.tensor(is_replayed).repeat_interleave(size),
                    is_unscorable=part.trained.advantages.is_unscorable,
                    is_truncated=part.trained.batch.is_truncated if self.pipeline.spec.mask_truncated else None,
                    is_masked=torch.tensor([(id(part), row) in masked for row in rows]),
                )
            )
            # The fresh groups that replayed ones stand for.
            counts += Counts(zero_signal=sum(is_replayed) * size)
            num_replayed += sum(is_replayed) * size
        books, num_fresh = self.pipeline.books, sum(part.scored.batch.num_completions for part in self._parts)
        books.ledger = books.ledger.plus(counts, ordered=num_fresh, replayed=num_replayed)
        books.ledger.balance()
        return counts

    def _provisional(self) -> StepTotals:
        """What the losses are divided by while the number of tokens is not known."""
        spec, num_ranks = self.pipeline.spec, self.pipeline.world.size
        return StepTotals(spec.rows_per_step, spec.token_estimate, spec.token_estimate * num_ranks)

    def _scored(self, num_groups: int) -> Iterator[Part]:
        """The step's groups, scored chunk by chunk."""
        pipeline = self.pipeline
        size = pipeline.spec.groups_per_chunk or num_groups
        finished = pipeline.producer.groups()
        for start in range(0, num_groups, size):
            count = min(size, num_groups - start)
            # What is made in this very step has been in the making since it was ordered.
            began = self.ordered if start == 0 and pipeline.producer.depth == 0 else time.perf_counter()
            rewarded = pipeline.world.together(partial(self._rewarded, finished, count, began))
            part = self._stand_in(pipeline.scorer.compare(rewarded))
            self._parts.append(part)
            yield part

    def _rewarded(self, finished: Iterator[tuple[int, CompletionGroup]], count: int, began: float) -> RewardedBatch:
        """The next `count` groups to finish, with their rewards."""
        pipeline = self.pipeline
        chunk = sorted((next(finished) for _ in range(count)), key=lambda item: item[0])
        came = time.perf_counter()
        batch = pipeline.collate([group for _, group in chunk])
        _require_pushed(batch, pipeline.sync.version)
        rewarded = pipeline.scorer.score(batch)
        self._waited += came - began
        self._rewards += time.perf_counter() - came
        return rewarded

    def _times(self, num_tokens: float) -> dict[str, float]:
        """Of the slowest rank. num_tokens: of all ranks."""
        world = self.pipeline.world
        waited = world.largest(self._waited)
        return {
            "time/generate": waited,
            "time/rewards": world.largest(self._rewards),
            "generation/tokens_per_second": num_tokens / max(waited, 1e-9),
        }

    def _stand_in(self, scored: ScoredBatch) -> Part:
        replay = self.pipeline.replay
        if replay is None:
            return Part(scored, TrainedBatch(scored.batch, scored.advantages))
        trained, fresh, replaced = replay.stand_in(scored, self.pipeline.collate, self.step, skip=self._num_replayed)
        self._num_replayed += len(replaced.displaced)
        return Part(scored, trained, fresh, replaced)

    def _run(self, part: Part, totals: StepTotals, *, is_last: bool) -> Iterator[tuple[MicroBatch, bool]]:
        spec = self.pipeline.spec
        trained = part.trained
        rows = rows_with_signal(trained) if spec.skips_zero_signal else list(range(trained.batch.num_completions))
        self._num_skipped += _ceil(trained.batch.num_completions, spec.micro_batch_size)
        num_rows = int(self.pipeline.world.largest(len(rows)))
        self._num_skipped -= _ceil(num_rows, spec.micro_batch_size)
        if not num_rows and is_last:
            # Gradients have to exist: a row whose advantage is 0 adds nothing to them.
            rows, num_rows = [shortest_row(trained)], 1
        micro_batches = self.pipeline.cut(trained, totals, rows, num_rows)
        for index, micro_batch in enumerate(micro_batches, 1):
            self._running = part
            self._run_rows.extend((part, row) for row in micro_batch.rows)
            yield micro_batch, is_last and index == len(micro_batches)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _require_pushed(batch: RolloutBatch, newest: int) -> None:
    """Raise `E-SYN-12` for a completion of a version that no push has confirmed, the base model's included."""
    strange = {version for version in batch.adapter_versions if not 1 <= version <= newest}
    if strange:
        raise SyncError(
            f"completions of policy version {min(strange)} were not asked for; versions 1 to {newest} were pushed",
            code="E-SYN-12",
            why="training on another policy's completions would go wrong without a sign",
            do="please report",
        )
