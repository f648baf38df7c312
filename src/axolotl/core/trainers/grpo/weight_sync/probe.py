"""A few fixed tokens, and what the policy in training thinks of them: what the server's answer is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from axolotl.core.trainers.grpo.algo.logprobs import token_logps_and_entropies

MAX_CONTEXT = 16
NUM_SCORED = 8
"""Few: training waits for both sides at every push, and every weight takes part in every token."""


@dataclass(frozen=True)
class Probe:
    """tokens: those that are scored, after context."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of_prompt(cls, ids: Sequence[int], max_len: int) -> Probe:
        """The prompt's first tokens, and those that come next; where the prompt ends it begins again.

        max_len: the most tokens that context and scored ones may be together, at least 2.
        """
        num_scored = min(NUM_SCORED, max_len - 1)
        num_context = min(MAX_CONTEXT, len(ids), max_len - num_scored)
        tokens = [ids[(num_context + index) % len(ids)] for index in range(num_scored)]
        return cls(tuple(ids[:num_context]), tuple(tokens))


class PolicyProbe:
    """One small forward pass of the trained model. Main thread.

    policy: returns the model (unwrapped; autocast of the trainer included). temperature: that of sampling.
    """

    def __init__(self, policy: Callable[[], PreTrainedModel], probe: Probe, temperature: float) -> None:
        self._policy = policy
        self.temperature = temperature
        self.probe = probe

    def current(self) -> torch.Tensor:
        """`[scored]` float64 log-probs under the weights as they are, without dropout."""
        model = self._policy()
        was_training = model.training
        model.train(False)
        try:
            return self._forward(model)
        finally:
            model.train(was_training)

    def base(self) -> torch.Tensor:
        """The same with the adapter off."""
        with self.adapted_policy().disable_adapter():
            return self.current()

    def adapted_policy(self) -> PeftModel:
        """The model itself, where it has an adapter."""
        return cast(PeftModel, self._policy())

    @torch.no_grad()
    def _forward(self, model: PreTrainedModel) -> torch.Tensor:
        probe = self.probe
        ids = torch.tensor([[*probe.context, *probe.tokens]], device=model.device)
        count = len(probe.tokens)
        logits = model(input_ids=ids, logits_to_keep=count + 1, use_cache=False).logits[:, -count - 1 : -1]
        logps, _ = token_logps_and_entropies(logits, ids[:, -count:], self.temperature)
        return logps[0].double().cpu()
