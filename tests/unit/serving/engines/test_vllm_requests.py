from __future__ import annotations

import pydantic
import pytest

from axolotl.serving.engines.vllm_requests import MAX_REASON_CHARACTERS, engine_reason, first_line

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
