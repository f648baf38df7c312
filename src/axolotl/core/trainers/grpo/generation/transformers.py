"""Completions from the policy itself, in the trainer's process: no server, no copy, never stale.

The decoding is the one of the transformers engine, so a run with and without a server samples alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow
from axolotl.serving.engines.decoding import decode
from axolotl.serving.logprobs import policy_logprobs
from axolotl.serving.wire import Sampling

IN_PROCESS = "in-process"


class TransformersBackend:
    """A `GenerationBackend` on the training model. It uses the model, so only the main thread may run it.

    policy: returns the model to sample from (unwrapped); asked at every call, since wrapping happens late.
    prompts_per_batch: prompts decoded together, which bounds the memory of the key-value cache.
    """

    is_thread_safe = False

    def __init__(
        self,
        policy: Callable[[], PreTrainedModel],
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        prompts_per_batch: int = 8,
    ) -> None:
        self._policy = policy
        self._eos_token_ids = tuple(eos_token_ids)
        self._pad_token_id = pad_token_id
        self._prompts_per_batch = prompts_per_batch

    def generate(
        self, rows: Sequence[PromptRow], seeds: Sequence[Sequence[int]], sampling: Sampling, version: int
    ) -> Iterator[tuple[int, CompletionGroup]]:
        for start in range(0, len(rows), self._prompts_per_batch):
            part = slice(start, start + self._prompts_per_batch)
            yield from enumerate(self._decode(rows[part], seeds[part], sampling, version), start)

    @torch.no_grad()
    def _decode(
        self, rows: Sequence[PromptRow], seeds: Sequence[Sequence[int]], sampling: Sampling, version: int
    ) -> list[CompletionGroup]:
        model = self._policy()
        was_training = model.training
        model.train(False)
        try:
            groups = decode(
                model,
                [list(row.ids) for row in rows],
                sampling,
                [list(group) for group in seeds],
                eos_token_ids=self._eos_token_ids,
                pad_token_id=self._pad_token_id,
            )
        finally:
            model.train(was_training)
        return [
            CompletionGroup(
                row,
                tuple(
                    Completion(
                        ids=tuple(item.ids),
                        logprobs=policy_logprobs(item),
                        is_truncated=item.finish_reason == "length",
                        adapter_version=version,
                        instance_id=IN_PROCESS,
                    )
                    for item in group.completions
                ),
            )
            for row, group in zip(rows, groups, strict=True)
        ]

    def close(self) -> None:
        """Nothing is held."""
