"""Completions from the generation server, at the version that weight sync says it serves."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from axolotl.core.trainers.grpo.protocols import WeightSync
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow
from axolotl.errors import ServerError
from axolotl.serving import wire
from axolotl.serving.client import ServerClient
from axolotl.serving.logprobs import policy_logprobs


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
        _require_asked(request, response, self._client.info.instance_id)
        is_cut = cuts(sampling)
        return [
            CompletionGroup(row, tuple(_completion(item, response, is_cut=is_cut) for item in group.completions))
            for row, group in zip(rows, response.groups, strict=True)
        ]

    def close(self) -> None:
        """The client is closed by whoever made it."""


def cuts(sampling: wire.Sampling) -> bool:
    """Whether a filter takes tokens out of the distribution."""
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def _require_asked(request: wire.GenerateRequest, response: wire.GenerateResponse, instance_id: str) -> None:
    """Nothing is trained on that another policy or another process made, whoever let it through."""
    got, wanted = (response.adapter_version, response.instance_id), (request.adapter_version, instance_id)
    if got != wanted:
        raise ServerError(
            "the server's answer does not fit the request",
            code="E-SRV-09",
            why=f"completions of (version, instance) {got}; asked was {wanted}",
            do="please report",
        )


def _completion(item: wire.Completion, response: wire.GenerateResponse, *, is_cut: bool) -> Completion:
    return Completion(
        ids=tuple(item.ids),
        logprobs=policy_logprobs(item),
        is_truncated=item.finish_reason == "length",
        adapter_version=response.adapter_version,
        instance_id=response.instance_id,
        is_renormalised=is_cut and item.log_kept is None,
    )
