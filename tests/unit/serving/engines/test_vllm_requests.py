from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.engines.vllm_requests import MAX_REASON_CHARACTERS, completion, engine_reason, first_line

WRAPPED = (
    "Call to add_lora method failed: Worker failed with error 'LoRA rank 16 is greater than max_lora_rank 8.', "
    "please check the stack trace above for the root cause"
)


class Strict(pydantic.BaseModel):
    length: int

    @pydantic.field_validator("length")
    @classmethod
    def short(cls, value: int) -> int:
        if value > 3:
            raise ValueError(f"length {value} is above 3\nand more about it")
        return value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (WRAPPED, "LoRA rank 16 is greater than max_lora_rank 8."),
        ("something else\nwith details", "something else"),
        ("", "RuntimeError"),
    ],
)
def test_a_workers_reason_is_unwrapped(text: str, reason: str) -> None:
    assert engine_reason(RuntimeError(text)) == reason


def test_a_validation_error_is_told_by_its_message() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Strict(length=5)
    assert first_line(caught.value) == "length 5 is above 3"


def test_long_texts_are_cut() -> None:
    assert first_line(ValueError("x" * 5000)) == "x" * MAX_REASON_CHARACTERS


@pytest.mark.parametrize("ending", ["stop", "length", "error"])
def test_what_vllm_gave_up_is_no_completion(ending: str) -> None:
    """It ends such a request like others, with the tokens it has so far: none."""
    ids = [] if ending == "error" else [7]
    row = SimpleNamespace(token_ids=ids, logprobs=SimpleNamespace(logprobs=[-1.0] * len(ids)), finish_reason=ending)
    output: Any = SimpleNamespace(outputs=[row])
    if ending == "error":
        with pytest.raises(EngineRejects, match="gave the request up"):
            completion(output)
    else:
        assert (completion(output).ids, completion(output).finish_reason) == (ids, ending)
