"""From the wire's `Sampling` to the fields of vLLM's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import Sampling

#: vLLM raises a smaller temperature to this one without saying so, which would falsify the log-probs.
LOWEST_TEMPERATURE = 0.01

#: Options with a key of their own: set there, the trainer knows them too.
OWN_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "n": "trl.num_generations",
        "max_tokens": "trl.max_completion_length",
        "temperature": "trl.temperature",
        "top_p": "trl.top_p",
        "top_k": "trl.top_k",
        "min_p": "trl.min_p",
        "repetition_penalty": "trl.repetition_penalty",
        "structured_outputs": "trl.vllm_guided_decoding_regex",
    }
)

#: What the engine itself decides: shape and meaning of the answer, seeds, and vLLM's internal fields.
ENGINE_FIELDS = frozenset(
    {
        "seed",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "output_kind",
        "output_text_buffer_length",
        "stream_interval",
        "skip_clone",
        "skip_reading_prefix_cache",
        "routed_experts_prompt_start",
        "trace_decode_token_ids",
        "extra_args",
        "watermarking",
    }
)


def sampling_fields(sampling: Sampling, known_fields: Collection[str]) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams` for one completion, without its seed.

    known_fields: the names that the installed `SamplingParams` has. Raises `EngineRejects` naming the option that
    cannot be served.
    """
    if 0.0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise EngineRejects(
            f"temperature {sampling.temperature}: vLLM takes 0 (greedy) or at least {LOWEST_TEMPERATURE}"
        )
    check_extra(sampling.extra, known_fields)
    fields: dict[str, Any] = {
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        **sampling.extra,
    }
    # Text is made only where stop strings have to be found in it.
    fields["detokenize"] = bool(sampling.extra.get("stop"))
    if sampling.structured_regex is not None:
        fields["structured_outputs"] = {"regex": sampling.structured_regex}
    return fields


def check_extra(extra: Mapping[str, Any], known_fields: Collection[str]) -> None:
    """Refuse entries of `generation_kwargs` that another key decides, that the engine decides, or that do not exist."""
    for name in extra:
        if name in OWN_KEYS:
            raise EngineRejects(f"generation_kwargs.{name}: set {OWN_KEYS[name]} instead")
        if name in ENGINE_FIELDS or name.startswith("_"):
            raise EngineRejects(f"generation_kwargs.{name}: decided by the server, it cannot be set")
        if name not in known_fields:
            raise EngineRejects(f"generation_kwargs.{name}: this version of vLLM has no such sampling parameter")
