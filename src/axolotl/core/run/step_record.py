"""The optimizer step that just ended, as the journal holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from axolotl.core.run.journal import StepRecord, group_records, weights_digest
from axolotl.core.trainers.grpo.ledger import Counts
from axolotl.core.trainers.grpo.open_rollout.parts import Part
from axolotl.core.trainers.grpo.rollout.replay import rewards_of
from axolotl.errors import PeerError

if TYPE_CHECKING:
    from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer


def step_record(trainer: AxolotlGRPOTrainer) -> StepRecord:
    """Collective: of the last step over all ranks, in their order, with the weights that it made."""
    assert trainer.last_step is not None, "no step was taken"
    result, loss = trainer.last_step
    own = [record for part in result.parts for record in _groups(part)]
    instances = {name for part in result.parts for name in part.trained.batch.instance_ids}
    weights, step = weights_digest(trainer.policy().named_parameters()), trainer.state.global_step
    ranks = trainer.pipeline.world.gather((own, instances, loss, result.counts, weights))
    require_same_weights([rank[-1] for rank in ranks], step)
    return StepRecord(
        epoch=trainer.sampler.epoch_of(step - 1),
        loss=sum(loss for _, _, loss, _, _ in ranks) / len(ranks),
        groups=[record for groups, _, _, _, _ in ranks for record in groups],
        instances=sorted(set().union(*(instances for _, instances, _, _, _ in ranks))),
        ledger=sum((counts for _, _, _, counts, _ in ranks), Counts()).as_dict(),
        weights=weights,
    )


def require_same_weights(digests: Sequence[str | None], step: int) -> None:
    """Raises `PeerError` `E-PEER-03`. digests: one a rank, after optimizer step `step`."""
    if len(set(digests)) > 1:
        raise PeerError(
            f"the processes of the run have different weights after step {step}",
            code="E-PEER-03",
            why=", ".join(f"process {rank}: {digest}" for rank, digest in enumerate(digests)),
            do="please report",
        )


def _groups(part: Part) -> list[dict[str, Any]]:
    if part.replaced is None:
        return group_records(part.trained.batch, part.scored.result.values)
    origins = [f"step {origin.step}" if origin.is_replayed else "fresh" for origin in part.replaced.origins]
    return group_records(part.trained.batch, rewards_of(part.replaced.groups), origins=origins)
