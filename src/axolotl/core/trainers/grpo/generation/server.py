"""Completions from the generation server, at the policy version that was ordered."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence, Set
from contextlib import closing

from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow
from axolotl.errors import ServerError
from axolotl.failpoints import point
from axolotl.serving import wire
from axolotl.serving.client import ServerClient
from axolotl.serving.logprobs import policy_logprobs

# Options of the engines that forbid tokens or move their logits.
_MASKS = frozenset({"allowed_token_ids", "bad_words", "logit_bias", "min_tokens"})


class ServerBackend:
    """A `GenerationBackend` over HTTP. Touches neither the model nor collectives, so any thread may run it."""

    is_thread_safe = True

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def generate(
        self, rows: Sequence[PromptRow], seeds: Sequence[Sequence[int]], sampling: wire.Sampling, version: int
    ) -> Iterator[tuple[int, CompletionGroup]]:
        request = wire.GenerateRequest(
            request_id=uuid.uuid4().hex,
            adapter_version=version,
            prompts=[list(row.ids) for row in rows],
            seeds=[list(group) for group in seeds],
            sampling=sampling,
        )
        is_cut = cuts(sampling)
        # The client lets no answer of another version through; who made a group is checked once more, here.
        with closing(self._client.stream(request)) as finished:
            for group in finished:
                _require_known(group, self._client.instances)
                yield group.index, CompletionGroup(rows[group.index], _completions(group, version, is_cut=is_cut))
                point("gen.partial")
        point("gen.received")

    def close(self) -> None:
        """The client is closed by whoever made it."""


def cuts(sampling: wire.Sampling) -> bool:
    """Whether something takes tokens out of the distribution, so that the sampler's log-probs are not the policy's."""
    has_filter = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    return has_filter or sampling.structured_regex is not None or bool(_MASKS & sampling.extra.keys())


def _require_known(group: wire.Group, instances: Set[str]) -> None:
    """Nothing is trained on that another process made, whoever let it through.

    instances: the processes that have served this run; several may have had a part in one answer.
    """
    if group.instance_id not in instances:
        raise ServerError(
            "the server's answer does not fit the request",
            code="E-SRV-09",
            why=f"completions from {group.instance_id}; asked was {', '.join(sorted(instances))}",
            do="please report",
        )


def _completions(group: wire.Group, version: int, *, is_cut: bool) -> tuple[Completion, ...]:
    assert group.instance_id is not None
    return tuple(
        Completion(
            ids=tuple(item.ids),
            logprobs=policy_logprobs(item),
            is_truncated=item.finish_reason == "length",
            adapter_version=version,
            instance_id=group.instance_id,
            is_renormalised=is_cut and item.log_kept is None,
        )
        for item in group.completions
    )
