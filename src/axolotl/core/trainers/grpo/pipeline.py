"""One optimizer step's way from prompts to micro-batches: sync, order, collect, score, cut.

    is a push due? ─► WeightSync.push(version)
    DataProducer.place(the order of the rollout `depth` ahead)
    DataProducer.groups ─► Scorer.score ─► split into micro-batches        chunk by chunk when streaming

The first step of a rollout does all of it; the further ones, where there are any, take their slice of what it left.

Main thread, every rank. The parts are chosen in `assembly.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
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
from axolotl.core.trainers.grpo.open_rollout.files import load_open, save_open
from axolotl.core.trainers.grpo.open_rollout.parts import OpenRollout, Part, by_slice
from axolotl.core.trainers.grpo.protocols import DataProducer, WeightSync
from axolotl.core.trainers.grpo.replaying import Replay, with_logps
from axolotl.core.trainers.grpo.rollout.pending_files import Pending, load_pending, save_pending
from axolotl.core.trainers.grpo.rollout.planning import Planner
from axolotl.core.trainers.grpo.rollout.replay import join_replay_metrics
from axolotl.core.trainers.grpo.rollout.replay_files import load_replay, save_replay
from axolotl.core.trainers.grpo.rollout.reroll import reroll_metrics
from axolotl.core.trainers.grpo.scoring import Collate, RewardedBatch, ScoredBatch, Scorer, TrainedBatch, join
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow, RolloutBatch, Slot
from axolotl.core.trainers.grpo.weight_sync.schedule import is_due, version_of
from axolotl.errors import Interrupted, SyncError

_REROLL = "reroll.json"
_LEDGER = "ledger.json"


@dataclass(frozen=True)
class StepResult:
    """What became of an optimizer step's completions.

    scored: those of the step. made: all of the rollout that the step began; None where it goes on with an earlier one.
    gradient_scale: what the gradients have to be multiplied with, and the loss: the micro-batches were divided by a
    number of tokens that was not known yet. counts: of this rank's completions, those whose last step it was. parts:
    what was trained.
    """

    scored: ScoredBatch
    metrics: dict[str, float]
    made: ScoredBatch | None = None
    gradient_scale: float = 1.0
    counts: Counts = field(default_factory=Counts)
    parts: tuple[Part, ...] = ()


@dataclass
class Books:
    """ledger: what became of the completions of all steps so far. rollout: the newest that training began with; None
    before the first."""

    ledger: Ledger = field(default_factory=Ledger)
    rollout: OpenRollout | None = None


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
        # Before the step asks for anything: what is ready now, it need not wait for.
        metrics = dict(self.producer.metrics)
        began = False
        if is_due(step, self.sync.version, self.spec.sync_interval, self.spec.span.length):
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
        result = StepResult(scored, self.describe(self.sample(scored)), made=scored)
        return self.cut(trained, self.totals([trained])), result

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

    def leave(self, step: int, *, is_other: bool) -> None:
        """Bring the generator to the policy that the run ends with, after optimizer steps `0 .. step - 1`.

        Args:
            is_other: it is not the policy after these steps, whose version the generator may have: it gets the next.
        """
        if not is_other:
            self.catch_up(step)
            return
        self._make_way()
        self.sync.push(version_of(step) + 1)

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

    def totals(self, parts: Sequence[TrainedBatch], rollout: Sequence[TrainedBatch] = ()) -> StepTotals:
        """Collective: of the step that `parts` make up on this rank.

        Args:
            rollout: all of the rollout that they are a slice of, where they are not all of it.
        """
        rows = sum(part.batch.num_completions for part in parts)
        tokens = self._num_tokens(parts)
        all_tokens = self._num_tokens(rollout) / self.spec.span.num_slices if rollout else tokens
        return StepTotals(rows, tokens / self.world.size, all_tokens)

    def _num_tokens(self, parts: Sequence[TrainedBatch]) -> float:
        """Collective: that count in the loss, over the ranks."""
        own = sum(num_counted(part.batch, mask_truncated=self.spec.mask_truncated) for part in parts)
        return self.world.total(own)

    def with_micro_batch_size(self, size: int) -> RolloutPipeline:
        """The same parts, cutting micro-batches of another size."""
        return replace(self, spec=replace(self.spec, micro_batch_size=size))

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
        if self.books.rollout is not None and self.spec.span.length > 1:
            save_open(self.books.rollout, directory)
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
        self.books.rollout = load_open(directory, self.rows, self.scorer, self.collate)
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
        span = self.spec.span
        # The oldest rollout that is not being trained yet.
        oldest = step if span.begins(step) else span.first(step) + span.length
        if self._resumed:
            for missing in range(oldest, self._resumed[0][0].step, span.length):
                self.producer.place(self.planner.plan(missing, self.sync.version))
        for order, groups in self._resumed:
            if groups:
                self.producer.adopt(order, groups)
            else:
                self.producer.place(replace(order, version=self.sync.version))
        self._resumed.clear()
        placed = self.producer.placed
        first = placed[-1].step + span.length if placed else oldest
        end = min(span.first(step) + self.producer.depth * span.length + 1, max(self.planner.num_steps, step + 1))
        for ahead in range(first, end, span.length):
            self.producer.place(self.planner.plan(ahead, self.sync.version))


@dataclass
class OpenStep:
    """An optimizer step in the making. Take all of `micro_batches`, then `result`."""

    pipeline: RolloutPipeline
    step: int
    metrics: dict[str, float]
    ordered: float
    _rollout: list[Part] = field(default_factory=list)
    _made: list[ScoredBatch] = field(default_factory=list)
    _running: Part | None = None
    _num_replayed: int = 0
    _run_rows: list[tuple[Part, int]] = field(default_factory=list)
    _num_skipped: int = 0
    _slots: tuple[Slot, ...] = ()
    _waited: float = 0.0
    _rewards: float = 0.0
    _rest: Iterator[Part] | None = None

    @property
    def begins(self) -> bool:
        """Whether the step begins a rollout."""
        return self.pipeline.spec.span.begins(self.step)

    @property
    def parts(self) -> list[Part]:
        """What there is so far of the slice that the step trains."""
        number = self.pipeline.spec.span.slice_of(self.step)
        return [part for part in self._rollout if part.number == number]

    def micro_batches(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Each with whether it is the last that the step trains, as soon as it can be run. After `restart`: all of them
        again."""
        if self.begins:
            yield from self._first_micro_batches()
            return
        rollout = self.pipeline.books.rollout
        assert rollout is not None and rollout.is_for(self.step, self.pipeline.spec.span), self.step
        self._rollout = rollout.parts
        totals, parts = self._totals(), self.parts
        for number, part in enumerate(parts, 1):
            yield from self._run(part, part.as_old(), totals, is_last=number == len(parts))

    def _first_micro_batches(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Of a rollout's first step: the policy is that of the log-probs which all of its steps count as the old ones.

        What this step trains comes by its old log-probs on the way; what later ones train needs a forward pass.
        """
        pipeline, num_slices = self.pipeline, self.pipeline.spec.span.num_slices
        if self._rest is None:
            order = pipeline.producer.placed[0]
            assert order.step == self.step, (order.step, self.step)
            self._slots = order.slots
            self._rest = self._scored(len(order.slots))
        # What was scored before a restart is kept; the rest comes as it would have come.
        parts: Iterable[Part] = chain(tuple(self._rollout), self._rest)
        if pipeline.spec.trains_early:
            totals = self._provisional()
        else:
            parts = list(parts)
            totals = self._totals()
        num_left = len(self._slots) // num_slices
        for part in parts:
            if part.number == 0:
                num_left -= len(part.scored.batch.groups)
                yield from self._run(part, part.trained, totals, is_last=num_left == 0)
            else:
                yield from self._run_for_later(part, totals)

    def restart(self, pipeline: RolloutPipeline) -> None:
        """Begin the training of this step again, from its first micro-batch, as `pipeline` cuts them."""
        self.pipeline = pipeline
        self._running = None
        self._run_rows.clear()
        self._num_skipped = 0

    def result(self, is_left_out: torch.Tensor, *, is_failed: bool = False) -> StepResult:
        """Collective. The numbers of the step, once all of its micro-batches were run.

        Args:
            is_left_out: `[n]` bool, the completions of the micro-batches in their order that had no part in the loss.
            is_failed: the optimizer does not take this step: replay learns nothing from it.
        """
        pipeline, spec, parts = self.pipeline, self.pipeline.spec, self.parts
        scored = join([part.scored for part in parts], pipeline.collate)
        sample = pipeline.sample(scored)
        made = join(self._made, pipeline.collate) if self.begins else None
        totals = self._totals()
        metrics = {
            **pipeline.describe(sample),
            **(self._learn(made, is_failed=is_failed) if made is not None else {}),
            **staleness_metrics(sample, version_of(self.step)),
            **self.metrics,
            **self._times(made),
        }
        if made is not None:
            pipeline.books.rollout = OpenRollout(self.step, self._rollout)
        if spec.skips_zero_signal:
            metrics["skipped_zero_adv_batches"] = float(self._num_skipped)
        counts = self._account(is_left_out, is_failed=is_failed)
        metrics |= sum(pipeline.world.gather(counts), Counts()).metrics()
        return StepResult(scored, metrics, made, self._gradient_scale(totals), counts, tuple(parts))

    def remember(self, micro_batch: MicroBatch, logps: torch.Tensor) -> None:
        """Keep the log-probs `[n, c]` that the present policy gives the micro-batch that was taken last, where a later
        step or the replay buffer needs them."""
        replay, span = self.pipeline.replay, self.pipeline.spec.span
        is_kept = self.begins and (span.length > 1 or (replay is not None and not replay.recomputes))
        if is_kept and self._running is not None:
            own = logps[: len(micro_batch.rows)].detach().float().cpu()
            rows = zip(micro_batch.rows, own, strict=True)
            self._running.logps.update(rows)

    def _gradient_scale(self, totals: StepTotals) -> float:
        spec = self.pipeline.spec
        tokens = totals.divisor(spec.loss_type)
        if not (self.begins and spec.trains_early and spec.loss_type in TOKEN_LOSSES and tokens > 0):
            return 1.0
        return self._provisional().divisor(spec.loss_type) / tokens

    def _totals(self) -> StepTotals:
        rollout = [part.trained for part in self._rollout] if self.pipeline.spec.span.num_slices > 1 else []
        return self.pipeline.totals([part.trained for part in self.parts], rollout)

    def _learn(self, made: ScoredBatch, *, is_failed: bool) -> dict[str, float]:
        """Replay and re-roll learn the groups that were made, once the first step has trained."""
        metrics: dict[str, float] = {}
        world = self.pipeline.world
        replay, reroll = self.pipeline.replay, self.pipeline.planner.reroll
        if replay is not None:
            for part in () if is_failed else self._rollout:
                fresh = part.fresh if replay.recomputes else with_logps(part.fresh, part.trained, part.logps)
                replay.learn(fresh, self.step)
            own = replay.metrics([part.replaced for part in self._rollout if part.replaced is not None])
            metrics |= join_replay_metrics(world.gather(own))
        if reroll is not None:
            reroll.learn(made.batch.groups, made.advantages.rewards)
            ranks = world.gather(reroll_metrics(reroll.queue, self._slots))
            metrics |= {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        return metrics

    def _account(self, is_left_out: torch.Tensor, *, is_failed: bool) -> Counts:
        """Every completion in one class, with the last step that trains it; the sums have to balance."""
        if not is_failed:
            left_out = iter(is_left_out.tolist())
            for part, row in self._run_rows:
                part.note(row, is_left_out=next(left_out, False))
            for part in self.parts:
                part.is_taken = True
        is_last = self.step + 1 == self.pipeline.planner.num_steps
        if not (self.pipeline.spec.span.ends_slice(self.step) or is_last):
            return Counts()
        counts, num_replayed, num_fresh = Counts(), 0, 0
        for part in self.parts:
            if part.is_counted:
                continue
            part.is_counted = True
            counts += _counts(part, mask_truncated=self.pipeline.spec.mask_truncated)
            num_replayed += part.num_replayed
            num_fresh += part.scored.batch.num_completions
        books = self.pipeline.books
        books.ledger = books.ledger.plus(counts, ordered=num_fresh, replayed=num_replayed)
        books.ledger.balance()
        return counts

    def _provisional(self) -> StepTotals:
        """What the losses are divided by while the number of tokens is not known."""
        spec, num_ranks = self.pipeline.spec, self.pipeline.world.size
        return StepTotals(spec.rows_per_step, spec.token_estimate, spec.token_estimate * num_ranks)

    def _scored(self, num_groups: int) -> Iterator[Part]:
        """The rollout's groups, scored chunk by chunk, each chunk cut into slices."""
        pipeline = self.pipeline
        size = pipeline.spec.groups_per_chunk or num_groups
        finished = pipeline.producer.groups()
        for start in range(0, num_groups, size):
            count = min(size, num_groups - start)
            # What is made in this very step has been in the making since it was ordered.
            began = self.ordered if start == 0 and pipeline.producer.depth == 0 else time.perf_counter()
            places, rewarded = pipeline.world.together(partial(self._rewarded, finished, count, began))
            whole = self._stand_in(pipeline.scorer.compare(rewarded))
            self._made.append(whole.scored)
            for part in by_slice(whole, places, num_groups // pipeline.spec.span.num_slices, pipeline.collate):
                self._rollout.append(part)
                yield part

    def _rewarded(
        self, finished: Iterator[tuple[int, CompletionGroup]], count: int, began: float
    ) -> tuple[list[int], RewardedBatch]:
        """The next `count` groups to finish: their places in the rollout, and what rewards they get."""
        pipeline = self.pipeline
        chunk = sorted((next(finished) for _ in range(count)), key=lambda item: item[0])
        came = time.perf_counter()
        batch = pipeline.collate([group for _, group in chunk])
        _require_pushed(batch, pipeline.sync.version)
        rewarded = pipeline.scorer.score(batch)
        self._waited += came - began
        self._rewards += time.perf_counter() - came
        return [place for place, _ in chunk], rewarded

    def _times(self, made: ScoredBatch | None) -> dict[str, float]:
        """Collective: the times of the slowest rank, the tokens of all."""
        world = self.pipeline.world
        waited = world.largest(self._waited)
        times = {"time/generate": waited, "time/rewards": world.largest(self._rewards)}
        if made is not None:
            num_tokens = world.total(float(made.batch.completion_mask.sum()))
            times["generation/tokens_per_second"] = num_tokens / max(waited, 1e-9)
        return times

    def _stand_in(self, scored: ScoredBatch) -> Part:
        replay = self.pipeline.replay
        if replay is None:
            return Part(scored, TrainedBatch(scored.batch, scored.advantages))
        trained, fresh, replaced = replay.stand_in(scored, self.pipeline.collate, self.step, skip=self._num_replayed)
        self._num_replayed += len(replaced.displaced)
        return Part(scored, trained, fresh, replaced)

    def _run(
        self, part: Part, trained: TrainedBatch, totals: StepTotals, *, is_last: bool
    ) -> Iterator[tuple[MicroBatch, bool]]:
        spec = self.pipeline.spec
        rows = self._rows(trained)
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

    def _run_for_later(self, part: Part, totals: StepTotals) -> Iterator[tuple[MicroBatch, bool]]:
        for micro_batch in self.pipeline.cut(part.trained, totals, self._rows(part.trained)):
            self._running = part
            yield replace(micro_batch, is_for_later=True), False

    def _rows(self, trained: TrainedBatch) -> list[int]:
        """The completions that are run."""
        if self.pipeline.spec.skips_zero_signal:
            return rows_with_signal(trained)
        return list(range(trained.batch.num_completions))


def _counts(part: Part, *, mask_truncated: bool) -> Counts:
    """The completions of `part` by what became of them, those that replayed groups stand for included."""
    if not part.is_taken:
        return Counts(failed=part.scored.batch.num_completions, replayed=part.num_replayed)
    batch, size = part.trained.batch, part.trained.batch.group_size
    origins = part.replaced.origins if part.replaced is not None else ()
    is_replayed = [origin.is_replayed for origin in origins] or [False] * len(batch.groups)
    facts = Facts(
        has_signal=part.trained.advantages.has_signal.repeat_interleave(size),
        is_replayed=torch.tensor(is_replayed).repeat_interleave(size),
        is_unscorable=part.trained.advantages.is_unscorable,
        is_truncated=batch.is_truncated if mask_truncated else None,
        is_masked=torch.tensor([not part.has_part.get(row, True) for row in range(batch.num_completions)]),
    )
    # The fresh groups that replayed ones stand for had no signal.
    return tally(facts) + Counts(zero_signal=part.num_replayed)


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
