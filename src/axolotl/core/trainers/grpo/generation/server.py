"""Completions from the generation server, at the version that weight sync says it serves."""

from __future__ import annotations

import uuid
from collections.abc import Sequence, Set

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
        _require_asked(request, response, self._client.instances)
        is_cut = cuts(sampling)
        return [
            CompletionGroup(row, _completions(group, response, is_cut=is_cut))
            for row, group in zip(rows, response.groups, strict=True)
        ]

    def close(self) -> None:
        """The client is closed by whoever made it."""


def cuts(sampling: wire.Sampling) -> bool:
    """Whether a filter takes tokens out of the distribution."""
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def _require_asked(request: wire.GenerateRequest, response: wire.GenerateResponse, instances: Set[str]) -> None:
    """Nothing is trained on that another policy or another process made, whoever let it through.

    instances: the processes that have served this run; several may have had a part in one answer.
    """
    made_by = {group.instance_id or response.instance_id for group in response.groups}
    if response.adapter_version == request.adapter_version and made_by <= instances:
        return
    raise ServerError(
        "the server's answer does not fit the request",
        code="E-SRV-09",
        why=f"completions of version {response.adapter_version} from {', '.join(sorted(made_by))}; "
        f"asked was version {request.adapter_version} of {', '.join(sorted(instances))}",
        do="please report",
    )


def _completions(group: wire.Group, response: wire.GenerateResponse, *, is_cut: bool) -> tuple[Completion, ...]:
    return tuple(
        Completion(
            ids=tuple(item.ids),
            logprobs=policy_logprobs(item),
            is_truncated=item.finish_reason == "length",
            adapter_version=response.adapter_version,
            instance_id=group.instance_id or response.instance_id,
            is_renormalised=is_cut and item.log_kept is None,
        )
        for item in group.completions
    )
