"""`AxolotlGRPOTrainer`: TRL's GRPO trainer with our rollouts. The only file that knows TRL's internals.

One "batch" of the transformers loop is one optimizer step: the data loader hands out a ticket a step, `training_step`
asks the pipeline for the micro-batches of that step and runs them itself. TRL computes the losses, the reference
model, checkpoints and logs. What we rely on is pinned by `tests/contract/test_trl_contract.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerState
from trl import GRPOTrainer  # type: ignore[attr-defined]

from axolotl import failpoints
from axolotl.core.run.checkpoints.store import CheckpointStore
from axolotl.core.trainers.grpo.algo.importance import (
    Importance,
    ImportanceSpec,
    WeightSample,
    importance_weights,
    without_rejected,
)
from axolotl.core.trainers.grpo.algo.logprobs import token_logps_and_entropies
from axolotl.core.trainers.grpo.algo.shares import TOKEN_TOTAL_LOSSES
from axolotl.core.trainers.grpo.algo.stored_logps import stored_policy_logps
from axolotl.core.trainers.grpo.memory import Logits, MemoryGuard, is_out_of_memory
from axolotl.core.trainers.grpo.metrics import off_policy_metrics, sampling_metrics
from axolotl.core.trainers.grpo.microbatch import MicroBatch
from axolotl.core.trainers.grpo.nonfinite import DIRECTORY, FiniteGuard, Ran, StopWhenNotFinite
from axolotl.core.trainers.grpo.pipeline import OpenStep, RolloutPipeline, StepResult
from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.scoring import ScoredBatch
from axolotl.core.trainers.grpo.types import CompletionGroup, RolloutBatch
from axolotl.core.trainers.grpo.weight_sync.in_process import require_finite_weights

Inputs = dict[str, torch.Tensor]
Ticket = dict[str, int]
Evaluate = Callable[[int, int], Sequence[CompletionGroup]]
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
        evaluation: tuple[int, Evaluate] | None = None,
    ) -> None:
        """Give the trainer its parts.

        Args:
            importance: None when sampler and trainer need no correction.
            evaluation: the number of held-out prompts, and what makes completions of one of them.
        """
        self.pipeline = pipeline
        self.sampler = sampler
        self.importance = importance
        self.evaluation = evaluation
        # TRL was built without vLLM, since generation is ours; its loss reads these two when it applies our ratios.
        self.use_vllm = importance is not None
        self.vllm_importance_sampling_correction = importance is not None
        self._forward: Forward | None = None
        # Completions of the micro-batch under way that count; None: all of them.
        self._num_weighted: int | None = None
        self._weighted: list[WeightSample] = []
        self._left_out: list[torch.Tensor] = []
        self._off_policy: list[torch.Tensor] = []
        self._ratios: list[torch.Tensor] = []
        self._policy_logps: torch.Tensor | None = None
        self._is_bias_told = False
        self.checkpoints = CheckpointStore(Path(cast(str, self.args.output_dir)))
        self.extra_state: Callable[[Path], None] = lambda checkpoint: None
        self._staging: Path | None = None
        self.last_step: tuple[StepResult, float] | None = None
        output_dir = Path(cast(str, self.args.output_dir))
        self.finite = FiniteGuard(self.accelerator, output_dir / DIRECTORY, self.policy, pipeline.world.total)
        self.add_callback(StopWhenNotFinite(self.finite))
        self._memory = MemoryGuard(pipeline.world.size)

    # -- data: one ticket an optimizer step ---------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Ticket]:
        return _tickets(self.sampler.steps_per_epoch)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Ticket]:
        assert self.evaluation is not None
        return _tickets(self.evaluation[0])

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    # -- one optimizer step -------------------------------------------------------------------------------------

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """All micro-batches of one optimizer step; returns the step's loss, detached."""
        started = time.perf_counter()
        step = self.pipeline.open(self.state.global_step)
        ran = self._run_step(model, step)
        is_sound = self.finite.admits(self.state.global_step + 1, model, ran)
        result = step.result(self._record_sampling("train"), is_failed=not is_sound)
        total = torch.stack([one.loss for one in ran]).sum() * result.gradient_scale
        _scale_gradients(model, result.gradient_scale)
        self._record(result, "train")
        self.last_step = (result, float(total))
        self._tell_bias(result.scored.batch)
        self._metrics["train"]["skipped_nonfinite_steps"].append(float(not is_sound))
        self._metrics["train"]["step_time"].append(time.perf_counter() - started)
        # transformers adds losses up: one that is not finite would be the mean of all that are logged with it.
        return total if is_sound else torch.zeros_like(total)

    def _run_step(self, model: torch.nn.Module, step: OpenStep) -> list[Ran]:
        """All micro-batches of the step. Where memory runs out, the step begins again with half as many completions at
        once: a backward pass that broke off has added a part of its gradient, which nothing can take back alone."""
        logged = {name: len(values) for name, values in self._metrics["train"].items()}
        ran: list[Ran] = []
        for micro_batch, is_last in step.micro_batches():
            model.train()
            try:
                if micro_batch.is_for_later:
                    step.remember(micro_batch, self._present_logps(micro_batch.inputs))
                    continue
                self.accelerator.gradient_state._set_sync_gradients(is_last)
                with nullcontext() if is_last else self.accelerator.no_sync(model):
                    ran.append(Ran(micro_batch, self._run(model, micro_batch)))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                size = self._memory.half(self.state.global_step + 1, self._logits(micro_batch), error)
            else:
                if self._policy_logps is not None:
                    step.remember(micro_batch, self._policy_logps)
                continue
            # Behind the handler: its traceback holds what has to be freed.
            self._forget_step(model, logged)
            self.pipeline = self.pipeline.with_micro_batch_size(size)
            step.restart(self.pipeline)
            return self._run_step(model, step)
        return ran

    def _forget_step(self, model: torch.nn.Module, logged: dict[str, int]) -> None:
        """As if no micro-batch of the step had been run. logged: values of each metric before it."""
        model.zero_grad()
        for memory in (self._weighted, self._left_out, self._off_policy, self._ratios):
            memory.clear()
        for name, values in self._metrics["train"].items():
            del values[logged.get(name, 0) :]
        clear_device_cache(garbage_collection=True)

    def _run(self, model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        with self.compute_loss_context_manager():
            loss = self._loss(model, micro_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def _loss(self, model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """TRL's loss of one micro-batch, weighted so that the micro-batches of a step add up to the step's loss."""
        inputs = dict(micro_batch.inputs)
        self._num_weighted = len(micro_batch.rows)
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
        forward = self._run_forward(model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled)
        logps, result = forward[0], None
        self._policy_logps = logps.detach()
        if "stored_logps" in inputs:
            inputs = {**inputs, "old_per_token_logps": stored_policy_logps(logps, inputs["stored_logps"])}
        if self.importance is not None:
            result = self._importance_weights(inputs, logps)
            inputs = {**inputs, "importance_sampling_ratio": result.weights}
            logps = without_rejected(logps, result, is_product=self.loss_type == "vespo")
        self._remember(inputs, logps, result)
        self._forward = (logps, *forward[1:])
        try:
            return cast(torch.Tensor, super().compute_loss(model, inputs, return_outputs=return_outputs))
        finally:
            self._forward = None

    def _importance_weights(self, inputs: Inputs, policy_logps: torch.Tensor) -> Importance:
        assert self.importance is not None
        policy = inputs.get("old_per_token_logps", policy_logps.detach())
        sampling = inputs["sampling_per_token_logps"]
        result = importance_weights(policy, sampling, inputs["completion_mask"], self.importance)
        if not self._is_bias_told:
            self._ratios.append((policy - sampling)[result.known.bool()].exp().cpu())
        return result

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
        return (tokens.numel() + tokens.shape[0]) * self._vocabulary() <= _MAX_LOGITS

    def _vocabulary(self) -> int:
        return int(self.policy().config.get_text_config().vocab_size)

    def _logits(self, micro_batch: MicroBatch) -> Logits:
        tokens = micro_batch.inputs["completion_ids"]
        return Logits(tokens.shape[0], tokens.shape[1] + 1, self._vocabulary(), self._logits_fit(tokens))

    @torch.no_grad()
    def _present_logps(self, inputs: Inputs) -> torch.Tensor:
        """Log-probs of the policy as it is, which later steps compare theirs with."""
        with self.compute_loss_context_manager():
            return self._run_forward(cast(torch.nn.Module, self.model), inputs)[0]

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
        _, evaluate = self.evaluation
        # The policy that is judged is the one that a checkpoint of this moment holds.
        self.pipeline.catch_up(self.state.global_step)
        micro_batches, result = self.pipeline.evaluate(evaluate(inputs[_TICKET], self.pipeline.sync.version))
        self._record(result, "eval")
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = [self._loss(model, micro_batch) * micro_batch.share for micro_batch in micro_batches]
        self._record_sampling("eval")
        return torch.stack(losses).sum().detach(), None, None

    # -- metrics ------------------------------------------------------------------------------------------------

    def _record(self, step: StepResult, mode: str) -> None:
        metrics = self._metrics[mode]
        for name, value in step.metrics.items():
            metrics[name].append(value)
        world = self.pipeline.world
        if step.made is not None:
            for logged in world.gather(step.made.result.metrics):
                for name, values in logged.items():
                    metrics[name].extend(values)
            if mode == "train":
                batch = step.made.batch
                num_tokens = world.total(float(batch.prompt_mask.sum() + batch.completion_mask.sum()))
                self.state.num_input_tokens_seen += int(num_tokens)
            self._record_completions(step.made)
        metrics["num_tokens"] = [float(self.state.num_input_tokens_seen)]

    def _record_completions(self, scored: ScoredBatch) -> None:
        """Rows of TRL's completions table, which `log` prints and saves when `log_completions` is on."""
        logs = cast(dict[str, Any], self._logs)
        logs["prompt"].extend(scored.prompts)
        logs["completion"].extend(scored.completions)
        for index, name in enumerate(self.pipeline.scorer.rewards.names):
            logs["rewards"][name].extend(scored.result.values[:, index].tolist())
        logs["advantages"].extend(scored.advantages.values.tolist())
        for column, values in scored.result.extra.items():
            logs["extra"][column].extend(values)

    def _remember(self, inputs: Inputs, logps: torch.Tensor, result: Importance | None) -> None:
        """What the loss of one micro-batch does with its completions."""
        is_left_out = ~_counted(inputs).bool().any(dim=1).cpu()
        if result is not None:
            self._weighted.append(result.counted())
            is_left_out |= result.is_left_out.cpu()
        if self.off_policy_mask_threshold is not None:
            is_dropped = ~self._off_policy_kept(inputs, logps).cpu()
            self._off_policy.append(is_dropped[: self._num_weighted])
            is_left_out |= is_dropped
        self._left_out.append(is_left_out[: self._num_weighted])

    def _off_policy_kept(self, inputs: Inputs, logps: torch.Tensor) -> torch.Tensor:
        """`[n]`: which completions the off-policy mask keeps, by TRL's own rule on what its loss will see."""
        sampled = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps", logps.detach()))
        kept = self.get_off_policy_mask(
            advantages=inputs["advantages"].unsqueeze(1),
            per_token_logps=logps,
            sampling_per_token_logps=sampled,
            mask=_counted(inputs),
            off_policy_threshold=cast(float, self.off_policy_mask_threshold),
        )
        return kept.squeeze(1).bool()

    def _record_sampling(self, mode: str) -> torch.Tensor:
        """Log what was remembered, over the whole step. Returns which completions had no part in the policy's loss, in
        the order of the micro-batches."""
        metrics: dict[str, float] = {}
        world = self.pipeline.world
        if self._weighted:
            metrics |= sampling_metrics(WeightSample.joined(world.gather(WeightSample.joined(self._weighted))))
        if self._off_policy:
            metrics |= off_policy_metrics(torch.cat(world.gather(torch.cat(self._off_policy))))
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        is_left_out = torch.cat(self._left_out) if self._left_out else torch.zeros(0, dtype=torch.bool)
        for memory in (self._weighted, self._off_policy, self._left_out):
            memory.clear()
        return is_left_out

    def _tell_bias(self, batch: RolloutBatch) -> None:
        """Once: what filters cost whose kept mass the engine does not tell, measured while every ratio should be 1."""
        if self._is_bias_told or not self._ratios:
            return
        mean = torch.cat(self._ratios).mean().item()
        self._ratios.clear()
        self._is_bias_told = True
        if batch.is_renormalised and self.pipeline.world.is_main:
            print(
                "warning: options of sampling (top_p, top_k, min_p, a regular expression, others that forbid tokens) "
                "cut the distribution, and the server does not say what they kept: the mean importance ratio is "
                f"{mean:.3f} where it should be 1; leave them out for unbiased weights",
                file=sys.stderr,
                flush=True,
            )

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """transformers writes it below a temporary directory; it gets its name when all of it is on the disk.

        `extra_state` adds its files on every rank. Uploads and the limit on the number wait until then.
        """
        # Weights that are not finite must never become what a run goes on from.
        require_finite_weights(self.policy(), self.state.global_step)
        save = super()._save_checkpoint
        ranks = self.pipeline.world

        def write(staged: Path) -> None:
            self._staging = staged.parent
            try:
                save(model, trial)  # type: ignore[no-untyped-call]
            finally:
                self._staging = None
            self.extra_state(staged)
            if ranks.is_main:
                self._remember_best()
                self.state.save_to_json(str(staged / "trainer_state.json"))

        checkpoint = self.checkpoints.save(self.state.global_step, write, ranks)
        ranks.alone(lambda: self.checkpoints.prune(checkpoint, best=self.state.best_model_checkpoint))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        failpoints.point("ckpt.after_model")
        super()._save_optimizer_and_scheduler(output_dir)
        failpoints.point("ckpt.after_optim")

    def _remember_best(self) -> None:
        """transformers looks for the best checkpoint where it writes, which is not where checkpoints end up."""
        step = self.state.best_global_step
        if step and (step == self.state.global_step or self.checkpoints.path(step).is_dir()):
            self.state.best_model_checkpoint = str(self.checkpoints.path(step))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def restore_finished(self, checkpoint: Path) -> None:
        """The policy and the state at the end of a run, from the checkpoint of its last step: ready to be saved."""
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if not self.restore_best():
            self._load_from_checkpoint(str(checkpoint))

    def restore_best(self) -> bool:
        """Take the policy of the best checkpoint, if `load_best_model_at_end` asks for it and there is one."""
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or best is None or not Path(best).is_dir():
            return False
        self._load_from_checkpoint(best)
        return True

    @property
    def holds_earlier_policy(self) -> bool:
        """Whether `load_best_model_at_end` has put the policy of an earlier step in the place of the last one."""
        is_loaded = bool(self.args.load_best_model_at_end) and self.state.best_model_checkpoint is not None
        return is_loaded and self.state.best_global_step != self.state.global_step

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL would write its README.md over a user's at every checkpoint; PEFT and transformers leave one in each."""

    def policy(self) -> PreTrainedModel:
        """The model that is trained, without the wrappers of accelerate."""
        return cast(PreTrainedModel, self.accelerator.unwrap_model(cast(torch.nn.Module, self.model)))


def _counted(inputs: Inputs) -> torch.Tensor:
    """`[n, c]` 1 on the tokens that count in the loss."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _scale_gradients(model: torch.nn.Module, factor: float) -> None:
    if factor != 1.0:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _tickets(count: int) -> DataLoader[Ticket]:
    """A loader of the numbers 0 .. count - 1: what a step trains on is looked up by number, not carried along.

    A ticket is a dict because transformers looks for names such as `labels` in every batch.
    """
    tickets = [{_TICKET: number} for number in range(count)]
    return DataLoader(cast(Any, tickets), batch_size=1, shuffle=False, collate_fn=_only)


def _only(items: list[Ticket]) -> Ticket:
    (item,) = items
    return item
