"""A request to generate or to score, from the engine to what may be sent."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator

from axolotl.errors import ServerError
from axolotl.serving.edge import invalid
from axolotl.serving.engines.protocol import Engine, EngineRejects
from axolotl.serving.seeds import fresh_seeds
from axolotl.serving.session import Session
from axolotl.serving.versions import PolicyVersions
from axolotl.serving.wire import Completion, GenerateRequest, Group


async def finished_groups(
    engine: Engine, versions: PolicyVersions, session: Session, request: GenerateRequest
) -> AsyncGenerator[Group, None]:
    """The groups of `request` as they finish; with `score_ids` the given tokens with their log-probs.

    Closing the generator aborts the request. Raises a `Refusal` when the run does not hold the server or loses it, when
    the version is not held, and for what the engine does not support.
    """
    with session.request(request.run_id), versions.use(request.adapter_version):
        groups = _sampled(engine, request) if request.score_ids is None else _scored(engine, request, request.score_ids)
        try:
            async for group in groups:
                # Another run may have taken the server meanwhile, with versions of the same numbers.
                session.check_run(request.run_id)
                yield group
        except EngineRejects as error:
            versions.check(request.adapter_version)  # replaced in the moment between our check and the engine's
            raise invalid(str(error)) from error
        except ServerError:
            session.check_run(request.run_id)  # given up because another run claimed the server
            raise
        finally:
            await groups.aclose()


async def _sampled(engine: Engine, request: GenerateRequest) -> AsyncGenerator[Group, None]:
    sampling = request.sampling
    seeds = request.seeds or fresh_seeds(len(request.prompts), sampling.n)
    groups = engine.generate(request.prompts, sampling, seeds, request.adapter_version)
    try:
        async for group in groups:
            yield Group(index=group.index, completions=[_sendable(completion) for completion in group.completions])
    finally:
        await _close(groups)


async def _scored(engine: Engine, request: GenerateRequest, score_ids: list[list[int]]) -> AsyncGenerator[Group, None]:
    scores = await engine.score(request.prompts, score_ids, request.sampling.temperature, request.adapter_version)
    for index, (ids, values) in enumerate(zip(score_ids, scores, strict=True)):
        completion = Completion(ids=ids, logprobs=_finite(values), finish_reason="scored")
        yield Group(index=index, completions=[completion])


def _sendable(completion: Completion) -> Completion:
    return completion.model_copy(update={"logprobs": _finite(completion.logprobs)})


def _finite(values: list[float] | list[float | None]) -> list[float | None]:
    """JSON has no NaN: what is not finite travels as null."""
    return [value if value is not None and math.isfinite(value) else None for value in values]


async def _close(groups: AsyncIterator[Group]) -> None:
    assert isinstance(groups, AsyncGenerator), "Engine.generate is an async generator"
    await groups.aclose()
