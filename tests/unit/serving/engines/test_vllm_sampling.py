from __future__ import annotations

from typing import Any

import pytest

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.vllm_sampling import ENGINE_FIELDS, OWN_KEYS, sampling_fields
from axolotl.serving.wire import Sampling

KNOWN = {"stop", "min_tokens", "temperature", "seed", "_eos_token_id"}


def fields(**options: Any) -> dict[str, Any]:
    return sampling_fields(Sampling(**{"max_tokens": 7, **options}), KNOWN)


def test_every_field_of_the_wire_arrives() -> None:
    result = fields(n=8, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2)
    assert result == {
        "n": 1,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "detokenize": False,
    }


def test_extra_options_arrive() -> None:
    assert fields(extra={"min_tokens": 3})["min_tokens"] == 3


@pytest.mark.parametrize("name", ["stop", "bad_words", "logit_bias", "min_tokens", "ignore_eos", "n", "num_beams"])
def test_null_means_not_set(name: str) -> None:
    assert fields(extra={name: None}) == fields()


def test_text_is_made_only_to_find_stop_strings_in_it() -> None:
    assert fields(extra={"stop": ["\n"]})["detokenize"] is True
    assert fields(extra={"stop": []})["detokenize"] is False


def test_a_regex_becomes_structured_outputs() -> None:
    assert fields(structured_regex="[0-9]+")["structured_outputs"] == {"regex": "[0-9]+"}


@pytest.mark.parametrize("name", sorted(OWN_KEYS))
def test_an_option_with_its_own_key_names_that_key(name: str) -> None:
    with pytest.raises(EngineRejects, match=OWN_KEYS[name]):
        fields(extra={name: 1})


@pytest.mark.parametrize("name", [*sorted(ENGINE_FIELDS), "_eos_token_id"])
def test_what_the_engine_decides_is_refused_by_name(name: str) -> None:
    with pytest.raises(EngineRejects, match=f"generation_kwargs.{name}: decided by the server"):
        fields(extra={name: 1})


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(EngineRejects, match=r"generation_kwargs\.num_beams"):
        fields(extra={"num_beams": 4})


@pytest.mark.parametrize("temperature", [1e-9, 0.0099])
def test_temperatures_that_vllm_would_raise_are_refused(temperature: float) -> None:
    with pytest.raises(EngineRejects, match=r"at least 0\.01"):
        fields(temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_other_temperatures_arrive(temperature: float) -> None:
    assert fields(temperature=temperature)["temperature"] == temperature
