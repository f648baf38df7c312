"""A few fixed tokens, and what the policy in training and the server each think of them."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from axolotl.core.trainers.grpo.algo.logprobs import token_logps_and_entropies
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import GenerateRequest, Sampling

_SEED = 20_260
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

    def current(self, tokens: Sequence[int] | None = None) -> torch.Tensor:
        """`[scored]` float64 log-probs under the weights as they are, without dropout: of the probe's tokens, or of
        others after the same context."""
        model = self._policy()
        was_training = model.training
        model.train(False)
        try:
            return self._forward(model, self.probe.tokens if tokens is None else tokens)
        finally:
            model.train(was_training)

    def base(self, tokens: Sequence[int] | None = None) -> torch.Tensor:
        """The same with the adapter off, where there is one."""
        with cast(PeftModel, self._policy()).disable_adapter():
            return self.current(tokens)

    def policy(self) -> PreTrainedModel:
        """The model itself."""
        return self._policy()

    @torch.no_grad()
    def _forward(self, model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([[*self.probe.context, *tokens]], device=model.device)
        count = len(tokens)
        logits = model(input_ids=ids, logits_to_keep=count + 1, use_cache=False).logits[:, -count - 1 : -1]
        logps, _ = token_logps_and_entropies(logits, ids[:, -count:], self.temperature)
        return logps[0].double().cpu()


class ServerProbe:
    """The same tokens, asked of the server. HTTP only, any thread."""

    def __init__(self, client: ServerClient, probe: Probe, temperature: float) -> None:
        self._client = client
        self._probe = probe
        self._temperature = temperature

    def score(self, version: int, tokens: Sequence[int] | None = None) -> torch.Tensor:
        """`[scored]` float64 log-probs of the probe's tokens, or of others after the same context."""
        tokens = self._probe.tokens if tokens is None else tokens
        scores = self._client.score([self._probe.context], [tokens], self._temperature, version)
        return torch.tensor(scores[0], dtype=torch.float64)

    def draw(self, version: int) -> tuple[tuple[int, ...], torch.Tensor]:
        """Tokens that the server draws after the context, and the log-probs it says they were drawn with."""
        request = GenerateRequest(
            request_id=f"draw-{uuid.uuid4().hex}",
            adapter_version=version,
            prompts=[list(self._probe.context)],
            sampling=Sampling(max_tokens=len(self._probe.tokens), temperature=self._temperature),
            seeds=[[_SEED]],
        )
        drawn = self._client.generate(request).groups[0].completions[0]
        logps = [math.nan if value is None else value for value in drawn.logprobs]
        return tuple(drawn.ids), torch.tensor(logps, dtype=torch.float64)
