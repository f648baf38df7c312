"""Reading a PEFT LoRA adapter directory: tensors, scale and checks, without PEFT and without touching a model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from axolotl.serving.engines.protocol import EngineRejects

_TENSOR_NAME = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
# Keys whose value does not change what the saved tensors mean; any other key must be unset.
_HARMLESS_KEYS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraPair:
    """The update of one module: `scale * b @ a`. a: `[rank, in]`, b: `[out, rank]`, float32."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def read_adapter(directory: Path, *, max_rank: int | None = None) -> dict[str, LoraPair]:
    """The pairs of an adapter directory by module name (`model.layers.0.self_attn.q_proj`).

    Raises:
        EngineRejects: an adapter feature other than plain LoRA, a tensor that is not half of a pair, a rank that does
            not fit, a value that is not finite. The text names the key, module or tensor.
    """
    try:
        config = json.loads((directory / "adapter_config.json").read_bytes())
    except ValueError as error:
        raise EngineRejects("adapter_config.json is not JSON") from error
    check_adapter_config(config)
    try:
        # From bytes: safetensors 0.8 loses some memory with every tensor of a file that it maps.
        tensors = load((directory / "adapter_model.safetensors").read_bytes())
    except SafetensorError as error:
        raise EngineRejects("adapter_model.safetensors is not a valid safetensors file") from error
    return pair_up(tensors, config, max_rank=max_rank)


def check_adapter_config(config: Any) -> None:
    """Raise `EngineRejects` for anything but plain LoRA, naming the key of adapter_config.json."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise EngineRejects("adapter_config.json: peft_type must be LORA")
    for key, value in config.items():
        if value and key not in _HARMLESS_KEYS:
            raise EngineRejects(f"adapter_config.json: {key} cannot be served, only plain LoRA can")
    if config.get("bias", "none") != "none":
        raise EngineRejects(f"adapter_config.json: bias {config['bias']!r} cannot be served, only 'none' can")
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise EngineRejects(
            f"adapter_config.json: init_lora_weights {config['init_lora_weights']!r} changes the base model, "
            "which the server does not see"
        )
    if type(config.get("r")) is not int or not isinstance(config.get("lora_alpha"), int | float):
        raise EngineRejects("adapter_config.json: r and lora_alpha must be numbers")


def pair_up(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, max_rank: int | None
) -> dict[str, LoraPair]:
    """Match A with B and work out each module's scale: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _copies(tensors).items():
        match = _TENSOR_NAME.match(name)
        if match is None:
            raise EngineRejects(f"tensor {name!r} is not a LoRA weight of a module")
        if tensor.dim() != 2 or tensor.numel() == 0:
            raise EngineRejects(f"tensor {name!r} has shape {list(tensor.shape)}, which is no LoRA matrix")
        if not bool(torch.isfinite(tensor).all()):
            raise EngineRejects(f"tensor {name!r} has values that are not finite")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise EngineRejects("the adapter holds no tensor")
    pairs = {}
    for module, pair in sorted(sides.items()):
        if pair.keys() != {"A", "B"}:
            raise EngineRejects(f"module {module!r} has lora_{next(iter(pair))} only")
        rank = _for_module(config.get("rank_pattern"), module, config["r"])
        if not pair["A"].shape[0] == pair["B"].shape[1] == rank:
            raise EngineRejects(
                f"module {module!r}: lora_A {list(pair['A'].shape)} and lora_B {list(pair['B'].shape)} "
                f"do not have rank {rank}"
            )
        if max_rank is not None and rank > max_rank:
            raise EngineRejects(f"adapter rank {rank} is above the server's limit {max_rank}")
        alpha = _for_module(config.get("alpha_pattern"), module, config["lora_alpha"])
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        pairs[module] = LoraPair(pair["A"], pair["B"], float(scale))
    return pairs


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In float32, all in one block of memory: blocks of one size are used again by the next adapter, where hundreds of
    small ones would scatter over the heap."""
    block = torch.empty(sum(tensor.numel() for tensor in tensors.values()), dtype=torch.float32)
    parts = torch.split(block, [tensor.numel() for tensor in tensors.values()])
    return {
        name: part.view(tensor.shape).copy_(tensor) for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def _for_module(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of the module's name, as PEFT reads its patterns."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
