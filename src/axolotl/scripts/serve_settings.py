"""From the config to an engine: which one, on which device, with which limits."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from axolotl.errors import ConfigError
from axolotl.loaders.device import pick_device, resolve_server_dtype
from axolotl.serving.engines.protocol import EngineName, EngineSettings
from axolotl.serving.fingerprint import read_model_config
from axolotl.utils.schemas.config import AxolotlConfig

CPU_CACHE_LIMIT = 4 << 30
CPU_CACHE_SHARE = 0.2
DEFAULT_UTILIZATION = 0.9


@dataclass(frozen=True)
class EngineChoice:
    """name: the engine. reason: why, for the one line that is printed."""

    name: EngineName
    reason: str
    device: str


def choose_engine(config: AxolotlConfig) -> EngineChoice:
    """`vllm.engine`; `auto` is vLLM where there is an accelerator and transformers on a CPU, where vLLM's adapter
    kernels are slower than merging the adapter."""
    device = pick_device(config.vllm.device)
    if config.vllm.engine != "auto":
        return EngineChoice(config.vllm.engine, f"vllm.engine: {config.vllm.engine}", device)
    if device == "cpu":
        return EngineChoice("transformers", "no accelerator; on a CPU it serves adapters faster than vLLM", device)
    if importlib.util.find_spec("vllm") is None:
        return EngineChoice("transformers", "vLLM is not installed; pip install 'axolotl[vllm]' to use it", device)
    return EngineChoice("vllm", f"accelerator {device}", device)


def engine_settings(config: AxolotlConfig, choice: EngineChoice, base_dir: Path) -> EngineSettings:
    """Everything the engine needs.

    On a CPU `gpu_memory_utilization` becomes the size of the key-value cache: at its default 0.9 the smaller of 4 GiB
    and a fifth of the free memory, and in proportion below or above that.

    Raises:
        ConfigError: the model has no `config.json` here, `vllm.max_model_len` is above the model's own limit, or
            `trl.weight_sync: nccl` is asked of a server that cannot do it.
    """
    model = resolve_model(config.base_model, base_dir)
    model_config = read_model_config(model, config.revision_of_model)
    # Without `vllm_lora_sync` an adapter reaches the server merged into full weights.
    serves_adapters = config.adapter is not None and config.trl.vllm_lora_sync
    vllm = config.vllm
    return EngineSettings(
        model=model,
        revision=config.revision_of_model,
        device=choice.device,
        dtype=resolve_server_dtype(vllm.dtype, device=choice.device, fallback=_checkpoint_dtype(model_config)),
        max_model_len=_max_model_len(vllm.max_model_len, model_config, choice.name),
        max_lora_rank=config.lora_r if serves_adapters else 0,
        max_loras=max_adapters(config),
        tensor_parallel_size=vllm.tensor_parallel_size,
        data_parallel_size=vllm.data_parallel_size,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        kv_cache_bytes=cpu_cache_bytes(vllm.gpu_memory_utilization) if choice.device == "cpu" else None,
        enable_prefix_caching=vllm.enable_prefix_caching is not False,
        enforce_eager=vllm.enforce_eager is True,
        trust_remote_code=vllm.trust_remote_code is True,
        reasoning_parser=vllm.reasoning_parser,
        seed=config.seed or 0,
        stall_timeout_s=float(config.trl.vllm_server_timeout or 300),
        weight_transfer=not serves_adapters and _takes_nccl(config, choice),
    )


def _takes_nccl(config: AxolotlConfig, choice: EngineChoice) -> bool:
    """Whether full weights may come over NCCL."""
    is_possible = choice.name == "vllm" and choice.device.startswith("cuda")
    if config.trl.weight_sync == "nccl" and not is_possible:
        raise ConfigError(
            "trl.weight_sync: nccl is not possible with this server",
            code="E-CFG-23",
            why=f"it takes vLLM on a GPU; this is the {choice.name} engine on {choice.device} ({choice.reason})",
            do="set trl.weight_sync: auto, or files",
        )
    return is_possible and config.trl.weight_sync != "files"


def without_effect(config: AxolotlConfig, engine: EngineName) -> list[str]:
    """One line for each option that is set and that `engine` has no use for."""
    if engine == "vllm":
        return []
    vllm = config.vllm
    unused = {
        "tensor_parallel_size": vllm.tensor_parallel_size > 1,
        "data_parallel_size": vllm.data_parallel_size > 1,
        "enable_prefix_caching": vllm.enable_prefix_caching is True,
        "enforce_eager": vllm.enforce_eager is True,
        "reasoning_parser": vllm.reasoning_parser is not None,
    }
    return [f"vllm.{key} has no effect with the {engine} engine" for key, is_set in unused.items() if is_set]


def max_adapters(config: AxolotlConfig) -> int:
    """Versions alive at once: the current one, one for each rollout in flight, and the one being loaded."""
    return (config.trl.prefetch_depth or 1) + 2


def resolve_model(base_model: str, base_dir: Path) -> str:
    """A directory as given or beside the config, otherwise a hub name."""
    if not Path(base_model).expanduser().is_dir() and (base_dir / base_model).is_dir():
        return str(base_dir / base_model)
    return str(Path(base_model).expanduser()) if Path(base_model).expanduser().is_dir() else base_model


def cpu_cache_bytes(utilization: float, available: int | None = None) -> int:
    """See `engine_settings`. available: free memory in bytes, None asks the machine."""
    free = psutil.virtual_memory().available if available is None else available
    return int(min(CPU_CACHE_LIMIT, CPU_CACHE_SHARE * free) * utilization / DEFAULT_UTILIZATION)


def _text_config(model_config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config that has several."""
    return model_config.get("text_config") or model_config


def _checkpoint_dtype(model_config: dict[str, Any]) -> str:
    text = _text_config(model_config)
    return str(text.get("dtype") or text.get("torch_dtype") or model_config.get("torch_dtype") or "bfloat16")


def _max_model_len(wanted: int | None, model_config: dict[str, Any], engine: EngineName) -> int:
    limit = _text_config(model_config).get("max_position_embeddings")
    if wanted is None:
        if limit is None:
            raise ConfigError(
                "vllm.max_model_len is not set, and the model's config names no limit", do="set vllm.max_model_len"
            )
        return int(limit)
    if engine == "transformers" and limit is not None and wanted > limit:
        raise ConfigError(
            f"vllm.max_model_len {wanted} is above the model's limit {limit}", do=f"set it to {limit} or less"
        )
    return wanted
