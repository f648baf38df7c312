"""Requests to a `tests.fakes.server.ScriptedServer`, and what it must answer."""

from __future__ import annotations

from axolotl.serving.wire import GenerateRequest, GenerateResponse, Sampling
from tests.fakes.server import expected_group


def request_for(num_prompts: int = 3, *, version: int = 0, n: int = 2, max_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        adapter_version=version,
        prompts=[[index + 1] for index in range(num_prompts)],
        sampling=Sampling(n=n, max_tokens=max_tokens),
        seeds=[[10 * index + position for position in range(n)] for index in range(num_prompts)],
    )


def expected(request: GenerateRequest, instance_id: str = "instance-1", *earlier: str) -> GenerateResponse:
    """earlier: the processes that made the first groups, where it was not the last one."""
    makers = [*earlier, *[instance_id] * (len(request.prompts) - len(earlier))]
    return GenerateResponse(
        request_id=request.request_id,
        instance_id=instance_id,
        adapter_version=request.adapter_version,
        groups=[
            expected_group(request, index).model_copy(update={"instance_id": maker})
            for index, maker in enumerate(makers)
        ],
    )
