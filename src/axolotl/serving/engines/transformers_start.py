"""From the settings to a loaded model and what the engine must know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from axolotl.serving.engines.attention import GROUPED_SDPA
from axolotl.serving.engines.decoding import DEFAULT_CACHE_TOKENS
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.fingerprint import fingerprint
from axolotl.serving.wire import Fingerprint


@dataclass(frozen=True)
class Loaded:
    """read_base: reads the model again, in the same number format, and returns its `state_dict`."""

    model: PreTrainedModel
    fingerprint: Fingerprint
    eos_token_ids: frozenset[int]
    pad_token_id: int
    max_cache_tokens: int
    read_base: Callable[[], Mapping[str, torch.Tensor]]


def load(settings: EngineSettings) -> Loaded:
    model = _load_model(settings)
    model.to(torch.device(settings.device))  # type: ignore[arg-type]  # transformers wraps the method
    tokenizer = AutoTokenizer.from_pretrained(
        settings.model, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos_ids = {eos} if isinstance(eos, int) else set(eos or ())
    if tokenizer.eos_token_id is not None:
        eos_ids.add(tokenizer.eos_token_id)
    return Loaded(
        model=model,
        fingerprint=fingerprint(settings.model, settings.revision, settings.trust_remote_code, tokenizer),
        eos_token_ids=frozenset(eos_ids),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos_ids, default=0),
        max_cache_tokens=cache_tokens(model, settings.kv_cache_bytes),
        read_base=lambda: _load_model(settings, local_files_only=True).state_dict(),
    )


def _load_model(settings: EngineSettings, *, local_files_only: bool = False) -> PreTrainedModel:
    """On the CPU. local_files_only: after the start nothing is fetched."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        settings.model,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        dtype=getattr(torch, settings.dtype),
        attn_implementation=GROUPED_SDPA,
        local_files_only=local_files_only,
    )
    model.requires_grad_(False)
    return model


def cache_tokens(model: PreTrainedModel, kv_cache_bytes: int | None) -> int:
    """How many cache positions, of all layers together, fit into `kv_cache_bytes`; at least 1024."""
    if kv_cache_bytes is None:
        return DEFAULT_CACHE_TOKENS
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    position_bytes = int(2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize)
    return max(1024, kv_cache_bytes // position_bytes)
