"""Completions from the generation server, at the version that weight sync says it serves."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence

from axolotl.core.trainers.grpo.protocols import WeightSync
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow
from axolotl.serving import wire
from axolotl.serving.client import ServerClient


class ServerBackend:
    """A `GenerationBackend` over HTTP. Touches neither the model nor collectives, so any thread may run it."""

    is_thread_safe = True

    def __init__(self, client: ServerClient, sync: WeightSync) -> None:
        self._client = client
        self._sync = sync

    def generate(
        self, rows: Sequence[PromptRow], seeds: Sequence[Sequence[int]], sampling: wire.Sampling
    ) -> list[CompletionGroup]:
        request = wire.GenerateRequest(
            request_id=uuid.uuid4().hex,
            adapter_version=self._sync.version,
            prompts=[list(row.ids) for row in rows],
            seeds=[list(group) for group in seeds],
            sampling=sampling,
        )
        response = self._client.generate(request)
        return [
            CompletionGroup(row, tuple(_completion(item, response) for item in group.completions))
            for row, group in zip(rows, response.groups, strict=True)
        ]

    def close(self) -> None:
        """The client is closed by whoever made it."""


def _completion(item: wire.Completion, response: wire.GenerateResponse) -> Completion:
    return Completion(
        ids=tuple(item.ids),
        logprobs=tuple(math.nan if value is None else value for value in item.logprobs),
        is_truncated=item.finish_reason == "length",
        adapter_version=response.adapter_version,
        instance_id=response.instance_id,
    )
