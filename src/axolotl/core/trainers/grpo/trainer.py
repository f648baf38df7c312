"""`AxolotlGRPOTrainer`: TRL's GRPO trainer with our rollouts. The only file that knows TRL's internals.

One "batch" of the transformers loop is one optimizer step: the data loader hands out a ticket a step, `training_step`
asks the pipeline for the micro-batches of that step and runs them itself. TRL computes the losses, the reference
model, checkpoints and logs. What we rely on is pinned by `tests/contract/test_trl_contract.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerState
from trl import GRPOTrainer  # type: ignore[attr-defined]

from axolotl.core.trainers.grpo.algo.importance import Importance, ImportanceSpec, importance_weights
from axolotl.core.trainers.grpo.algo.logprobs import token_logps_and_entropies
from axolotl.core.trainers.grpo.algo.shares import TOKEN_TOTAL_LOSSES
from axolotl.core.trainers.grpo.metrics import sampling_metrics
from axolotl.core.trainers.grpo.microbatch import MicroBatch
from axolotl.core.trainers.grpo.pipeline import RolloutPipeline, StepBatch
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer
from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.types import PromptRow, RolloutBatch
from axolotl.errors import NumericError

Inputs = dict[str, torch.Tensor]
Ticket = dict[str, int]
Forward = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

_TICKET = "ticket"

# 128 MiB of float32 logits; autograd keeps about as much again.
_MAX_LOGITS = 2**25


class AxolotlGRPOTrainer(GRPOTrainer):
    """GRPO on TRL's losses and our pipeline.

    Call `attach` once after construction: the pipeline needs parts that exist only then (accelerator, state).
    """

    def attach(
        self,
        pipeline: RolloutPipeline,
        sampler: GroupSampler,
        *,
        importance: ImportanceSpec | None,
        evaluation: tuple[Sequence[PromptRow], SyncProducer] | None = None,
    ) -> None:
        """Give the trainer its parts.

        Args:
            importance: None when sampler and trainer need no correction.
            evaluation: held-out prompts and what generates for them.
        """
        self.pipeline = pipeline
        self.sampler = sampler
        self.importance = importance
        self.evaluation = evaluation
        # TRL was built without vLLM, since generation is ours; its loss reads these two when it applies our ratios.
        self.use_vllm = importance is not None
        self.vllm_importance_sampling_correction = importance is not None
        self._forward: Forward | None = None
        self._weighted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ratios: list[torch.Tensor] = []
        self._is_bias_told = False

    # -- data: one ticket an optimizer step ---------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Ticket]:
        return _tickets(self.sampler.steps_per_epoch)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Ticket]:
        assert self.evaluation is not None
        return _tickets(len(self.evaluation[0]))

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    # -- one optimizer step -------------------------------------------------------------------------------------

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """All micro-batches of one optimizer step; returns the step's loss, detached."""
        started = time.perf_counter()
        step = self.pipeline.step(self.state.global_step)
        model.train()
        self._record(step, "train")
        total = torch.zeros((), device=self.accelerator.device)
        for index, micro_batch in enumerate(step.micro_batches):
            is_last = index == len(step.micro_batches) - 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                total += self._run(model, micro_batch)
        self._record_sampling("train")
        self._tell_bias(step.scored.batch)
        if not bool(total.isfinite()):
            raise NumericError(
                f"the loss of step {self.state.global_step + 1} is not finite ({total.item()})",
                why="the weights are still those of the step before",
                do="lower learning_rate, check the rewards' size, and go on with --resume",
            )
        self._metrics["train"]["step_time"].append(time.perf_counter() - started)
        return total

    def _run(self, model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        with self.compute_loss_context_manager():
            loss = self._loss(model, micro_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def _loss(self, model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """TRL's loss of one micro-batch, weighted so that the micro-batches of a step add up to the step's loss."""
        inputs = dict(micro_batch.inputs)
        if self.beta != 0.0:
            inputs["ref_per_token_logps"] = self._reference_logps(inputs)
        # TRL divides by the accumulation steps; 1/share makes that a multiplication with the share.
        self.current_gradient_accumulation_steps = 1.0 / micro_batch.share  # type: ignore[assignment]
        if self.loss_type in TOKEN_TOTAL_LOSSES:
            inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * micro_batch.share
        return self.compute_loss(model, inputs)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One forward pass, importance weights from its own detached log-probs, then TRL's loss on that forward."""
        self._forward = self._run_forward(model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled)
        try:
            if self.importance is not None:
                inputs = {**inputs, "importance_sampling_ratio": self._importance_weights(inputs, self._forward[0])}
            return cast(torch.Tensor, super().compute_loss(model, inputs, return_outputs=return_outputs))
        finally:
            self._forward = None

    def _importance_weights(self, inputs: Inputs, policy_logps: torch.Tensor) -> torch.Tensor:
        assert self.importance is not None
        policy = inputs.get("old_per_token_logps", policy_logps.detach())
        sampling = inputs["sampling_per_token_logps"]
        result = importance_weights(policy, sampling, inputs["completion_mask"], self.importance)
        self._remember(result, (policy - sampling).abs())
        if not self._is_bias_told:
            self._ratios.append((policy - sampling)[result.known.bool()].exp().cpu())
        return result.weights

    # -- log-probs ----------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Forward:
        """TRL's loss asks for the forward here; inside `compute_loss` it has been run already."""
        if self._forward is not None:
            return self._forward
        return cast(Forward, super()._get_per_token_logps_and_entropies(*args, **kwargs))

    def _run_forward(self, model: torch.nn.Module, inputs: Inputs, **kwargs: Any) -> Forward:
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        tokens = inputs["completion_ids"]
        if self._logits_fit(tokens):
            # TRL's head scores every position on a CPU, prompts included; this one scores completions.
            output = model(
                input_ids, attention_mask=attention_mask, logits_to_keep=tokens.shape[1] + 1, use_cache=False
            )
            logps, entropies = token_logps_and_entropies(output.logits[:, :-1], tokens, self.temperature)
            return logps, entropies, None
        forward = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, tokens.shape[1], **kwargs
        )
        return cast(Forward, forward)

    def _logits_fit(self, tokens: torch.Tensor) -> bool:
        """Whether the logits of the completions may be held at once, on a CPU; elsewhere TRL's chunked head is best."""
        if self.aux_loss_enabled or self._entropy_bonus_enabled or self.accelerator.device.type != "cpu":
            return False
        vocabulary = int(self.policy().config.get_text_config().vocab_size)
        return (tokens.numel() + tokens.shape[0]) * vocabulary <= _MAX_LOGITS

    @torch.no_grad()
    def _reference_logps(self, inputs: Inputs) -> torch.Tensor:
        """Log-probs of the reference policy: TRL's reference model, or the model without its adapter."""
        if self.ref_model is not None:
            return self._run_forward(cast(torch.nn.Module, self.ref_model), inputs)[0]
        with cast(PeftModel, self.policy()).disable_adapter():
            return self._run_forward(cast(torch.nn.Module, self.model), inputs)[0]

    # -- evaluation ---------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: torch.nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """One held-out prompt through the same generation, rewards and loss; metrics come out as `eval_*`."""
        assert self.evaluation is not None
        rows, producer = self.evaluation
        # The policy that is judged is the one that a checkpoint of this moment holds.
        self.pipeline.catch_up(self.state.global_step)
        step = self.pipeline.evaluate(producer.roll_out([rows[inputs[_TICKET]]], epoch=-1))
        self._record(step, "eval")
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = [self._loss(model, micro_batch) * micro_batch.share for micro_batch in step.micro_batches]
        self._record_sampling("eval")
        return torch.stack(losses).sum().detach(), None, None

    # -- metrics ------------------------------------------------------------------------------------------------

    def _record(self, step: StepBatch, mode: str) -> None:
        metrics = self._metrics[mode]
        for name, value in step.metrics.items():
            metrics[name].append(value)
        for name, values in step.scored.result.metrics.items():
            metrics[name].extend(values)
        if mode == "train":
            batch = step.scored.batch
            self.state.num_input_tokens_seen += int(batch.prompt_mask.sum() + batch.completion_mask.sum())
        metrics["num_tokens"] = [float(self.state.num_input_tokens_seen)]
        self._record_completions(step)

    def _record_completions(self, step: StepBatch) -> None:
        """Rows of TRL's completions table, which `log` prints and saves when `log_completions` is on."""
        scored = step.scored
        logs = cast(dict[str, Any], self._logs)
        logs["prompt"].extend(scored.prompts)
        logs["completion"].extend(scored.completions)
        for index, name in enumerate(self.pipeline.scorer.rewards.names):
            logs["rewards"][name].extend(scored.result.values[:, index].tolist())
        logs["advantages"].extend(scored.advantages.values.tolist())
        for column, values in scored.result.extra.items():
            logs["extra"][column].extend(values)

    def _remember(self, result: Importance, gaps: torch.Tensor) -> None:
        known = result.known.bool()
        # A sequence's weight counts once, however long the sequence is.
        weights = result.weights.flatten() if result.weights.shape[1] == 1 else result.weights[known]
        self._weighted.append((gaps[known].cpu(), weights.cpu()))

    def _record_sampling(self, mode: str) -> None:
        """Minima and maxima over the whole step, not averages of those of its micro-batches."""
        if not self._weighted:
            return
        gaps, weights = (torch.cat(column) for column in zip(*self._weighted, strict=True))
        self._weighted.clear()
        for name, value in sampling_metrics(gaps, weights).items():
            self._metrics[mode][name].append(value)

    def _tell_bias(self, batch: RolloutBatch) -> None:
        """Once: what filters cost whose kept mass the engine does not tell, measured while every ratio should be 1."""
        if self._is_bias_told or not self._ratios:
            return
        mean = torch.cat(self._ratios).mean().item()
        self._ratios.clear()
        self._is_bias_told = True
        if batch.is_renormalised:
            print(
                "warning: top_p, top_k or min_p cut the distribution and the server does not say what they kept: the "
                f"mean importance ratio is {mean:.3f} where it should be 1; leave them out for unbiased weights",
                file=sys.stderr,
                flush=True,
            )

    def restore_finished(self, checkpoint: Path) -> None:
        """The policy and the state at the end of a run, from the checkpoint of its last step: ready to be saved."""
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        best = self.state.best_model_checkpoint
        is_best = self.args.load_best_model_at_end and best is not None and Path(best).is_dir()
        self._load_from_checkpoint(str(best if is_best else checkpoint))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL would write its README.md over a user's at every checkpoint; PEFT and transformers leave one in each."""

    def policy(self) -> PreTrainedModel:
        """The model that is trained, without the wrappers of accelerate."""
        return cast(PreTrainedModel, self.accelerator.unwrap_model(cast(torch.nn.Module, self.model)))


def _tickets(count: int) -> DataLoader[Ticket]:
    """A loader of the numbers 0 .. count - 1: what a step trains on is looked up by number, not carried along.

    A ticket is a dict because transformers looks for names such as `labels` in every batch.
    """
    tickets = [{_TICKET: number} for number in range(count)]
    return DataLoader(cast(Any, tickets), batch_size=1, shuffle=False, collate_fn=_only)


def _only(items: list[Ticket]) -> Ticket:
    (item,) = items
    return item
