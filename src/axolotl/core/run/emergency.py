"""A checkpoint of the last finished optimizer step, saved where a run ends in the middle of the next one.

While a run waits for the server, or for its answer, nothing of the model moves: the weights, the optimizer and the
scheduler are those of the last finished step, so that a complete checkpoint can be written without finishing this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from axolotl.core.run.checkpoints.manifest import verify
from axolotl.core.run.faults import kept
from axolotl.errors import AxolotlError, ConfigError, Interrupted, PeerError, ServerError, StorageError, SyncError

if TYPE_CHECKING:
    from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer


@contextmanager
def emergency_checkpoint(
    trainer: AxolotlGRPOTrainer, output_dir: Path, *, is_urgent: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Save one when the block ends with a fault of the server, of the sync, of storage (a full `vllm.sync_dir` where
    the output directory is not), of the config (a metric that evaluations turn out not to have), or with an
    interruption; unless it exists already, or `is_urgent` says there is no time.

    The fault goes on, with what is kept. A save that fails too is told in its details and leaves no half checkpoint.
    """
    try:
        yield
    except (ServerError, SyncError, StorageError, ConfigError, Interrupted, PeerError) as fault:
        # With several processes saving is collective: all of them have to have ended here.
        can_save = not is_urgent() and trainer.pipeline.world.may_save(fault) and _leaves_policy(fault)
        problem = _save(trainer, output_dir) if can_save else None
        if problem is not None:
            fault.details += (f"the checkpoint of step {trainer.state.global_step} could not be saved: {problem}",)
        fault.saved = kept(output_dir)
        raise


def _leaves_policy(fault: AxolotlError) -> bool:
    """Whether the fault, here or where it happened, is one of those that are no fault of the policy's."""
    kinds = {kind.exit_code for kind in (ServerError, SyncError, StorageError, ConfigError)}
    return not isinstance(fault, PeerError) or fault.exit_code_there in kinds


def _save(trainer: AxolotlGRPOTrainer, output_dir: Path) -> Exception | None:
    step = trainer.state.global_step
    if step == 0 or not verify(output_dir / f"checkpoint-{step}", contents=False):
        return None
    try:
        # What transformers does at a step's end when a save is due.
        trainer._save_checkpoint(cast(torch.nn.Module, trainer.model), trial=None)
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    except Exception as problem:
        return problem
    return None
