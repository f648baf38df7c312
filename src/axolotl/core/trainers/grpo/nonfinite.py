"""Steps whose advantages, loss or gradient are not finite: the optimizer does not take them.

    micro-batches that were run ─► FiniteGuard.admits ─► no: gradients dropped, micro-batch kept on disk, counted
                                                         three in a row: a checkpoint, then `E-NUM-01`

A skipped step is a step: the global step, the learning rate's schedule and the data go on. Weights and the optimizer's
moments stay as they are. Weights that are not finite themselves cannot be mended by skipping: `E-NUM-02` at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from axolotl.core.trainers.grpo.microbatch import MicroBatch
from axolotl.core.trainers.grpo.rollout.group_files import write_state
from axolotl.core.trainers.grpo.weight_sync.in_process import require_finite_weights
from axolotl.errors import NumericError

DIRECTORY = "nonfinite"
MOST_IN_A_ROW = 3

# A run that skips every other step must not fill the disk.
_MOST_DUMPS = 20


@dataclass(frozen=True)
class Ran:
    """A micro-batch after its backward pass. loss: its part of the step's, a detached scalar."""

    micro_batch: MicroBatch
    loss: torch.Tensor


class FiniteGuard:
    """Says whether the optimizer may take a step. Main thread, every rank.

    directory: where micro-batches are kept. policy: returns the model whose weights are looked at. total: the sum of
    one number a rank, on every rank.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: Path,
        policy: Callable[[], nn.Module],
        total: Callable[[float], float] = float,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._directory = directory
        self._policy = policy
        self._total = total
        self._warn = warn or _to_stderr
        self._num_in_a_row = 0
        self._num_dumped = 0
        self.fault: NumericError | None = None

    def admits(self, step: int, model: nn.Module, ran: Sequence[Ran]) -> bool:
        """Collective, with the same answer on every rank: whether step `step` (from 1) is to be taken. If not, its
        gradients are gone.

        Raises:
            NumericError: `E-NUM-02` the weights are not finite.
        """
        wrong = [(one, what) for one, what in zip(ran, _not_finite(ran), strict=True) if what]
        if self._any_rank(bool(wrong)):
            self._skip(step, wrong[0][1] if wrong else "the loss of another process", [one for one, _ in wrong])
        elif self._any_rank(not bool(_gradient_norm(model).isfinite())):
            if not self._is_overflow():
                # The sum of all of them may be what is too large.
                self._skip(step, "the gradient norm", ran)
        else:
            self._num_in_a_row = 0
            return True
        _drop_gradients(model, is_scaled=self._accelerator.scaler is not None)
        return False

    def require(self) -> None:
        """Raise `NumericError` `E-NUM-01` when the run ended for too many skipped steps."""
        if self.fault is not None:
            raise self.fault

    def _skip(self, step: int, what: str, ran: Sequence[Ran]) -> None:
        require_finite_weights(self._policy(), step - 1)
        self._num_in_a_row += 1
        place = self._dump(step, what, ran) if ran else ""
        if self._accelerator.is_main_process or ran:
            self._warn(f"warning: step {step} is skipped: {what} is not finite{place}")
        if self._num_in_a_row >= MOST_IN_A_ROW:
            self.fault = NumericError(
                f"{self._num_in_a_row} optimizer steps in a row were not finite; in step {step} it was {what}",
                why=f"the weights are those after step {step - self._num_in_a_row}: none of these steps was taken",
                do=f"look at {self._directory}, lower learning_rate or the size of the rewards, and use --resume",
            )

    def _any_rank(self, holds: bool) -> bool:
        return self._total(float(holds)) > 0

    def _is_overflow(self) -> bool:
        """Whether float16's own loss scaling explains the gradient: it lowers the scale and skips such steps anyway."""
        scaler = self._accelerator.scaler
        return scaler is not None and scaler.get_scale() > 1.0

    def _dump(self, step: int, what: str, ran: Sequence[Ran]) -> str:
        """Keep tensors and circumstances; returns what to say about it."""
        if self._num_dumped >= _MOST_DUMPS:
            return ""
        rank = self._accelerator.process_index
        name = f"step-{step}" if rank == 0 else f"step-{step}.rank-{rank}"
        tensors = {
            f"{number}.{key}": value.detach().cpu().clone().contiguous()
            for number, one in enumerate(ran)
            for key, value in one.micro_batch.inputs.items()
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_state(self._directory, name, _record(step, rank, what, ran), tensors)
        except (OSError, SafetensorError) as problem:
            return f"; what it computed could not be kept ({problem})"
        self._num_dumped += 1
        return f"; what it computed with is in {self._directory / name}.safetensors"


class StopWhenNotFinite(TrainerCallback):
    """Ends the training behind the step that was one too many, with a checkpoint of it."""

    def __init__(self, guard: FiniteGuard) -> None:
        self._guard = guard

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._guard.fault is not None:
            control.should_log = control.should_save = control.should_training_stop = True


def _not_finite(ran: Sequence[Ran]) -> list[str]:
    """For each micro-batch what is not finite, empty where all is; one look at the device."""
    pairs = [torch.stack([one.micro_batch.inputs["advantages"].isfinite().all(), one.loss.isfinite()]) for one in ran]
    return [
        "" if advantages and loss else "the loss" if advantages else "an advantage"
        for advantages, loss in torch.stack(pairs).tolist()
    ]


def _gradient_norm(model: nn.Module) -> torch.Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def _drop_gradients(model: nn.Module, *, is_scaled: bool) -> None:
    """Optimizers pass over what has no gradient. A loss scaler wants to find one, and skips the step for this one."""
    for parameter in model.parameters():
        if parameter.grad is not None and is_scaled:
            parameter.grad.fill_(torch.inf)
        else:
            parameter.grad = None


def _record(step: int, rank: int, what: str, ran: Sequence[Ran]) -> dict[str, Any]:
    """JSON has no NaN: losses are texts."""
    micro_batches = [
        {"prompts": list(one.micro_batch.prompts), "share": one.micro_batch.share, "loss": str(one.loss.item())}
        for one in ran
    ]
    return {"step": step, "rank": rank, "not_finite": what, "micro_batches": micro_batches}


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
