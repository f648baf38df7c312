"""Top-level options about the base model and its tokenizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from axolotl.utils.schemas.base import REQUIRED, Options, option
from axolotl.utils.schemas.scalars import AsWord, Bool, Text, TextList, read_text

Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]


def _read_pad_token(value: object) -> str | None:
    """An empty text, as in the guide's quick start, leaves the choice to the loader."""
    return None if value is None or value == "" else read_text(value)


class SpecialTokens(Options):
    """Tokens with a role of their own."""

    pad_token: Annotated[str | None, BeforeValidator(_read_pad_token)] = option(
        None, "Token that fills up short rows; chosen from the tokenizer when empty."
    )
    eos_token: Text | None = option(None, "Token that ends a completion.")
    bos_token: Text | None = option(None, "Token that begins a text.")
    unk_token: Text | None = option(None, "Token for what the vocabulary lacks.")
    additional_special_tokens: TextList | None = option(None, "Further tokens that are never split.")


class ModelOptions(Options):
    base_model: Text = option(REQUIRED, "Model to train: a local directory or an id of the hub.", min_length=1)
    revision_of_model: Text | None = option(None, "Branch, tag or commit of the model on the hub.")
    tokenizer_config: Text | None = option(None, "Where the tokenizer comes from; `base_model` when unset.")
    trust_remote_code: Bool = option(False, "Let the model's repository run its own code.")
    chat_template: Text | None = option(
        None,
        "Chat template: `tokenizer_default`, a shipped name such as `chatml`, a Jinja file, or Jinja text.",
        null_means="tokenizer_default",
    )
    special_tokens: SpecialTokens = option(SpecialTokens, "Which tokens have a role of their own.")
    attn_implementation: Annotated[Attention, AsWord] | None = option(
        None, "Attention kernel; `sdpa` when neither this nor one of the switches below says otherwise."
    )
    flash_attention: Bool = option(False, "Use FlashAttention; on a CPU its equal, PyTorch's own.")
    sdp_attention: Bool = option(False, "Use PyTorch's scaled dot product attention.")
    eager_attention: Bool = option(False, "Use attention written out in plain operations.")
    load_in_4bit: Bool = option(False, "Hold the frozen base model in 4 bits.")
    load_in_8bit: Bool = option(False, "Hold the frozen base model in 8 bits.")
