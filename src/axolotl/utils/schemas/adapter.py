"""Top-level options about the adapter that is trained in place of all the weights."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator

from axolotl.utils.schemas.base import Options, option
from axolotl.utils.schemas.scalars import AsWord, Bool, Float, Int, Text, TextList, TextOrList, read_bool, show


def _read_adapter(value: object) -> object:
    """An empty text is how some configs write full fine-tuning."""
    return None if value == "" else str(value) if isinstance(value, str) else value


InitLora = bool | str
INITS_OF_BASE = ("pissa", "olora")
_INITS = ("gaussian", "orthogonal", *INITS_OF_BASE)


def _read_init(value: object) -> object:
    if (
        value is None
        or value in _INITS
        or (isinstance(value, str) and re.fullmatch(r"pissa_niter_[1-9]\d{0,3}", value))
    ):
        return value
    try:
        return read_bool(value)
    except ValueError:
        choices = ", ".join(("true", "false", *_INITS, "pissa_niter_[number]"))
        raise ValueError(f"needs one of {choices}, not {show(value)}") from None


class AdapterOptions(Options):
    adapter: Annotated[Literal["lora", "qlora"] | None, BeforeValidator(_read_adapter)] = option(
        None, "Train a LoRA adapter (`qlora`: over a 4-bit base); empty trains all the weights."
    )
    lora_r: Int = option(8, "Rank of the adapter.", ge=1)
    lora_alpha: Int = option(16, "Scale of the adapter: its output is multiplied by `lora_alpha / lora_r`.", ge=1)
    lora_dropout: Float = option(0.0, "Dropout in front of the adapter.", ge=0.0, lt=1.0)
    lora_target_modules: TextOrList | None = option(
        None, "Modules that get an adapter, as names or one regular expression; all linear layers when unset."
    )
    lora_target_linear: Bool = option(False, "Give every linear layer an adapter.")
    lora_modules_to_save: TextList | None = option(None, "Modules that are trained and saved whole.")
    lora_bias: Annotated[Literal["none", "all", "lora_only"], AsWord] = option("none", "Which biases are trained.")
    lora_model_dir: Text | None = option(None, "Directory of an existing adapter to go on from.")
    peft_init_lora_weights: Annotated[InitLora | None, BeforeValidator(_read_init)] = option(
        None,
        "How it begins: `true`, `false`, `gaussian`, `orthogonal`, `pissa`, `pissa_niter_[number]` or `olora`.",
        null_means=True,
    )
    peft_use_dora: Bool = option(False, "Train DoRA: direction and magnitude apart.")
    peft_use_rslora: Bool = option(False, "Scale by `lora_alpha / sqrt(lora_r)`.")
