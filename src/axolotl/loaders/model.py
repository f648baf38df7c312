"""The policy: base model and adapter description from the config."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from axolotl.errors import ConfigError, EnvironmentFault
from axolotl.loaders.precision import Precision
from axolotl.loaders.refusals import OWN_CODE_DO, OWN_CODE_WHY, needs_own_code
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.user_code import pass_interruption


def load_model(
    config: AxolotlConfig, tokenizer: PreTrainedTokenizerBase, precision: Precision, device: str
) -> PreTrainedModel:
    """The base model on the CPU (the trainer places it), embeddings grown when the tokenizer has more tokens.

    Raises:
        ConfigError: `base_model` cannot be loaded.
        EnvironmentFault: a package that the settings need is missing.
    """
    kwargs: dict[str, Any] = {
        "dtype": precision.weights,
        "attn_implementation": attention(config, device),
        "trust_remote_code": bool(config.trust_remote_code),
        "revision": config.revision_of_model,
    }
    quantization = _quantization(config, precision)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(_source(config), **kwargs)
    except ImportError as error:
        raise EnvironmentFault(
            f"{config.base_model} needs a package that is not installed",
            code="E-ENV-03",
            why=str(error).strip().splitlines()[0],
            do="install it, or change attn_implementation / load_in_4bit / load_in_8bit",
        ) from error
    except Exception as error:
        # A broken config.json or file of weights fails wherever the libraries first use it, with any exception.
        pass_interruption(error)
        if _is_the_machine(error):
            raise
        if needs_own_code(error):
            raise ConfigError(
                f"base_model: {config.base_model} cannot be loaded",
                code="E-CFG-11",
                why=OWN_CODE_WHY,
                do=OWN_CODE_DO,
            ) from error
        raise ConfigError(
            f"base_model: {config.base_model} cannot be loaded",
            code="E-CFG-11",
            why=" ".join(str(error).split())[:300] or type(error).__name__,
            do="give a directory with config.json and the safetensors weights that belong to it, "
            "or a model id that this machine can reach",
        ) from error
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    if len(tokenizer) > embeddings.num_embeddings:
        if config.trl.beta and config.adapter is None:
            raise ConfigError(
                "special_tokens: new tokens cannot be combined with trl.beta in full fine-tuning",
                code="E-CFG-13",
                why="the reference model has no embeddings for them",
                do="set trl.beta to 0, use an adapter, or use tokens that the model knows",
            )
        model.resize_token_embeddings(len(tokenizer))
    return model


def _is_the_machine(error: Exception) -> bool:
    """Out of memory or space, or a device that failed: no fault of the files."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_memory = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return is_memory or isinstance(error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError))


def _source(config: AxolotlConfig) -> str:
    local = Path(config.base_model).expanduser()
    return str(local) if local.is_dir() else config.base_model


def attention(config: AxolotlConfig, device: str) -> str:
    """The attention kernel. FlashAttention and FlexAttention do not train on a CPU; there exact attention, which is
    what they mean, is PyTorch's SDPA."""
    if config.attn_implementation:
        asked = config.attn_implementation
    elif config.flash_attention:
        asked = "flash_attention_2"
    elif config.eager_attention:
        asked = "eager"
    else:
        asked = "sdpa"
    return "sdpa" if device == "cpu" and asked.startswith(("flash", "flex")) else asked


def lora_config(config: AxolotlConfig) -> LoraConfig | None:
    """PEFT's description of the adapter; None for full fine-tuning."""
    if config.adapter is None:
        return None
    targets: list[str] | str | None = config.lora_target_modules
    if config.lora_target_linear or targets is None:
        targets = "all-linear"
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        modules_to_save=config.lora_modules_to_save or None,
        bias=config.lora_bias,
        init_lora_weights=cast(Any, config.peft_init_lora_weights),
        use_dora=bool(config.peft_use_dora),
        use_rslora=bool(config.peft_use_rslora),
        task_type="CAUSAL_LM",
    )


def _quantization(config: AxolotlConfig, precision: Precision) -> BitsAndBytesConfig | None:
    if config.load_in_4bit or config.adapter == "qlora":
        return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=precision.autocast or torch.float32,
        )
    if config.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return None
