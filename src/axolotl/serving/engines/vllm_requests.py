"""What goes into vLLM with a request and what comes out of it, in our own terms."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.vllm_sampling import sampling_fields
from axolotl.serving.wire import Completion, Sampling

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

LARGEST_SEED = 2**63 - 1

#: Longest text of vLLM's that is passed on; its messages can name every module of a model.
MAX_REASON_CHARACTERS = 600


def params_maker(sampling: Sampling) -> Callable[[int], SamplingParams]:
    """A function from a seed to the parameters of one completion; what is wrong with them is raised here, once."""
    from pydantic import ValidationError
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    fields = sampling_fields(sampling, SamplingParams.__struct_fields__)
    fields |= {"logprobs": 0, "flat_logprobs": True, "skip_clone": True}
    adapter = _validator()

    def make(seed: int) -> SamplingParams:
        if not 0 <= seed <= LARGEST_SEED:
            raise EngineRejects(f"seed {seed} is not between 0 and {LARGEST_SEED}")
        try:
            params = adapter.validate_python({**fields, "seed": seed})
        except ValidationError as error:
            last = error.errors(include_url=False)[-1]
            raise EngineRejects(f"generation_kwargs.{_option(last['loc'])}: {last['msg']}") from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise EngineRejects(first_line(error)) from error
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return params

    return make


@functools.cache
def _validator() -> TypeAdapter[SamplingParams]:
    """vLLM's own checks of types, which its constructor leaves out: a wrong one would reach the engine process."""
    from pydantic import TypeAdapter
    from vllm.sampling_params import SamplingParams

    return TypeAdapter(SamplingParams)


def _option(location: tuple[int | str, ...]) -> str:
    """The option's name in a pydantic error location, which begins with names of pydantic's own."""
    from vllm.sampling_params import SamplingParams

    names = [str(part) for part in location]
    known = [index for index, name in enumerate(names) if name in SamplingParams.__struct_fields__]
    return ".".join(names[known[0] :] if known else names)


def completion(output: RequestOutput) -> Completion:
    """Raises `EngineRejects` for a request that vLLM gave up by itself, which it ends like one that is finished."""
    result = output.outputs[0]
    if result.finish_reason == "error":
        raise EngineRejects("vLLM gave the request up; a regular expression may have taken too long to compile")
    flat: Any = result.logprobs
    assert len(flat.logprobs) == len(result.token_ids), (len(flat.logprobs), len(result.token_ids))
    return Completion(
        ids=list(result.token_ids),
        logprobs=[value if math.isfinite(value) else None for value in flat.logprobs],
        finish_reason="length" if result.finish_reason == "length" else "stop",
    )


def engine_reason(error: Exception) -> str:
    """What a worker raised, out of the layers of text that vLLM wraps around it on the way back."""
    text = first_line(error)
    match = re.search(r"Worker failed with error '(?P<reason>.*)', please check the stack trace", text)
    return match["reason"] if match else text


def first_line(error: BaseException) -> str:
    from pydantic import ValidationError

    text = error.errors(include_url=False)[-1]["msg"] if isinstance(error, ValidationError) else str(error)
    lines = text.strip().splitlines()
    return lines[0].removeprefix("Value error, ")[:MAX_REASON_CHARACTERS] if lines else type(error).__name__
