"""What a step refuses to train on, whoever let it through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.pipeline import RolloutPipeline
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.types import CompletionGroup, Order, PromptRow, RolloutBatch, Slot
from axolotl.errors import SyncError

NEWEST = 3


class Scored(Exception):
    """The batch went on to the rewards."""


def batch(*versions: int) -> RolloutBatch:
    """One completion of one token a version."""
    count = len(versions)
    ids, mask = torch.zeros(count, 1, dtype=torch.long), torch.ones(count, 1, dtype=torch.long)
    return RolloutBatch(
        prompt_ids=ids,
        prompt_mask=mask,
        completion_ids=ids,
        completion_mask=mask,
        sampling_logps=None,
        is_truncated=torch.zeros(count, dtype=torch.bool),
        rows=tuple(PromptRow(index, "p", (0,), {}) for index in range(count)),
        group_size=1,
        adapter_versions=versions,
        instance_ids=("i",) * count,
        groups=tuple(CompletionGroup(PromptRow(index, "p", (0,), {}), ()) for index in range(count)),
    )


def pipeline(produced: RolloutBatch) -> RolloutPipeline:
    """One whose newest confirmed version is `NEWEST`."""

    def score(batch: RolloutBatch) -> None:
        raise Scored

    order = Order(NEWEST - 1, 0, NEWEST, tuple(Slot(row) for row in range(produced.num_completions)))
    parts: Any = {
        "planner": SimpleNamespace(num_steps=NEWEST, reroll=None),
        "producer": SimpleNamespace(
            depth=0, placed=(order,), groups=lambda: iter(enumerate(produced.groups)), metrics={}
        ),
        "scorer": SimpleNamespace(score=score, compare=lambda rewarded: rewarded),
        "collate": lambda groups: produced,
        "sync": SimpleNamespace(version=NEWEST, metrics={}, keeps_versions=True),
        "accelerator": None,
    }
    return RolloutPipeline(spec=StepSpec(micro_batch_size=1, loss_type="dapo"), **parts)


def train(produced: RolloutBatch) -> None:
    next(pipeline(produced).open(NEWEST - 1).micro_batches())


def evaluate(produced: RolloutBatch) -> None:
    pipeline(produced).evaluate(produced.groups)


@pytest.mark.parametrize("use", [train, evaluate])
@pytest.mark.parametrize("versions", [(3, 0), (3, 4), (-1, 3), (2**30,)])
def test_completions_of_a_version_that_was_never_pushed_are_refused(use: Any, versions: tuple[int, ...]) -> None:
    with pytest.raises(SyncError, match="versions 1 to 3 were pushed") as problem:
        use(batch(*versions))
    assert problem.value.code == "E-SYN-12"
    (strange,) = set(versions) - {3}
    assert f"policy version {strange} " in problem.value.what


@pytest.mark.parametrize("use", [train, evaluate])
def test_versions_that_were_pushed_are_scored(use: Any) -> None:
    with pytest.raises(Scored):
        use(batch(3, 2, 1))
