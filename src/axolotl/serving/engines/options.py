"""The generation options of a request beyond those with a field of their own: read, checked, and refused by name.

They mean what they mean in vLLM, so that a config does the same on both engines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import Sampling

NEGATIVE_INFINITY = float("-inf")

#: vLLM takes no smaller one either (but 0); far below, logits divided by it overflow.
LOWEST_TEMPERATURE = 0.01

#: vLLM cuts larger biases to this, which is as good as always or never.
LARGEST_BIAS = 100.0

LARGEST_PENALTY = 2.0

_DIGITS = re.compile("[0-9]{1,12}")


@dataclass(frozen=True)
class TokenRules:
    """When a completion ends, and which tokens are favoured.

    stop_ids: end a completion, and are part of it. forbidden_early: cannot be drawn before `min_tokens` others were.
    presence_penalty, frequency_penalty: what a token's logit loses once it is in the completion, and with each time it
    is. logit_bias: what is added to a token's logit. allowed_token_ids: no other can be drawn; None means any.
    """

    stop_ids: frozenset[int]
    min_tokens: int = 0
    forbidden_early: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None

    def bias(self, vocab_size: int, device: torch.device) -> torch.Tensor | None:
        """`[vocab_size]` float32 to add to the logits, minus infinity for what is not allowed; None adds nothing."""
        if not self.logit_bias and self.allowed_token_ids is None:
            return None
        bias = torch.zeros(vocab_size)
        if self.allowed_token_ids is not None:
            bias.fill_(NEGATIVE_INFINITY)
            bias[list(self.allowed_token_ids)] = 0.0
        for token, value in self.logit_bias.items():
            bias[token] += value
        return bias.to(device)


def token_rules(sampling: Sampling, eos_token_ids: frozenset[int], vocab_size: int | None = None) -> TokenRules:
    """The rules of a request, from `generation_kwargs` (`sampling.extra`).

    vocab_size: token ids must be below it; None skips that check, where no model is at hand yet.

    Raises:
        EngineRejects: an option that is not supported, or a value that it cannot have, by name.
    """
    if sampling.structured_regex is not None:
        raise EngineRejects("vllm_guided_decoding_regex: the transformers engine cannot constrain the output")
    if 0.0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise EngineRejects(
            f"temperature {sampling.temperature}: it must be 0 (greedy) or at least {LOWEST_TEMPERATURE}"
        )
    unknown = sorted(sampling.extra.keys() - _READERS.keys())
    if unknown:
        raise EngineRejects(
            f"generation_kwargs: the transformers engine does not support {', '.join(unknown)}; "
            f"it supports {', '.join(sorted(_READERS))}"
        )
    given = {name: _READERS[name](name, value) for name, value in sampling.extra.items()}
    if vocab_size is not None:
        for name in _TOKEN_OPTIONS & given.keys():
            _check_vocabulary(name, given[name], vocab_size)
    min_tokens: int = given.get("min_tokens", 0)
    if min_tokens > sampling.max_tokens:
        raise EngineRejects(f"generation_kwargs.min_tokens {min_tokens} is not between 0 and {sampling.max_tokens}")
    stop_ids = frozenset(given.get("stop_token_ids", ())) | (
        frozenset() if given.get("ignore_eos", False) else eos_token_ids
    )
    forbidden_early = tuple(sorted(stop_ids | eos_token_ids)) if min_tokens else ()
    allowed: tuple[int, ...] | None = given.get("allowed_token_ids")
    if allowed is not None and set(allowed) <= set(forbidden_early):
        raise EngineRejects("generation_kwargs.allowed_token_ids leaves no token before min_tokens are drawn")
    return TokenRules(
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        forbidden_early=forbidden_early,
        presence_penalty=given.get("presence_penalty", 0.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        logit_bias=given.get("logit_bias", {}),
        allowed_token_ids=allowed,
    )


def _read_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise _wrong(name, "a list of token ids", value)
    return tuple(value)


def _read_allowed(name: str, value: Any) -> tuple[int, ...]:
    ids = _read_ids(name, value)
    if not ids:
        raise _wrong(name, "at least one token id", value)
    return ids


def _read_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _read_count(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _wrong(name, "a whole number, 0 or more", value)
    return value


def _read_penalty(name: str, value: Any) -> float:
    if not _is_number(value) or abs(value) > LARGEST_PENALTY:
        raise _wrong(name, f"a number between -{LARGEST_PENALTY} and {LARGEST_PENALTY}", value)
    return float(value)


def _read_bias(name: str, value: Any) -> dict[int, float]:
    """JSON has text for keys only, so an id may come as digits."""
    wanted = "a mapping from token ids to numbers"
    if not isinstance(value, dict):
        raise _wrong(name, wanted, value)
    result = {}
    for key, bias in value.items():
        is_id = (type(key) is int and key >= 0) or (isinstance(key, str) and key.isascii() and key.isdigit())
        if not is_id or not _is_number(bias):
            raise _wrong(name, wanted, {key: bias})
        result[int(key)] = float(max(-LARGEST_BIAS, min(LARGEST_BIAS, bias)))
    return result


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "allowed_token_ids": _read_allowed,
    "frequency_penalty": _read_penalty,
    "ignore_eos": _read_flag,
    "logit_bias": _read_bias,
    "min_tokens": _read_count,
    "presence_penalty": _read_penalty,
    "stop_token_ids": _read_ids,
}
_TOKEN_OPTIONS = frozenset({"allowed_token_ids", "logit_bias", "stop_token_ids"})


def _check_vocabulary(name: str, tokens: tuple[int, ...] | dict[int, float], vocab_size: int) -> None:
    outside = [token for token in tokens if token >= vocab_size]
    if outside:
        raise EngineRejects(f"generation_kwargs.{name}: token id {outside[0]} is not in the vocabulary of {vocab_size}")


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _wrong(name: str, wanted: str, value: Any) -> EngineRejects:
    return EngineRejects(f"generation_kwargs.{name} needs {wanted}, not {value!r:.80}")
