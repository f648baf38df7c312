"""From `EngineSettings` to the arguments of vLLM's engine: plain values, no vLLM import."""

from __future__ import annotations

from typing import Any

from axolotl.errors import ConfigError
from axolotl.serving.engines.protocol import EngineSettings

#: The adapter ranks that vLLM compiles its kernels for.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

#: vLLM's own default on a CPU is 128 tokens a cache block, and only whole blocks of a prompt are shared between
#: completions; 32 is the smallest size its CPU kernels take well.
CPU_BLOCK_SIZE = 32

#: Used when nothing says how much memory the cache may take on a CPU.
CPU_CACHE_BYTES = 1 << 30

#: Tokens a step may hold on a CPU, unless one sequence alone may be longer.
CPU_STEP_TOKENS = 4096

WORKER_EXTENSION = "axolotl.serving.engines.vllm_worker.WorkerExtension"


def lora_rank(rank: int) -> int:
    """The smallest rank vLLM accepts that holds `rank`."""
    for accepted in LORA_RANKS:
        if rank <= accepted:
            return accepted
    raise ConfigError(
        f"lora_r: {rank} is more than vLLM can serve",
        code="E-CFG-21",
        why=f"vLLM takes adapters up to rank {LORA_RANKS[-1]}",
        do=f"set lora_r to at most {LORA_RANKS[-1]}, or vllm.engine: transformers",
    )


def engine_arguments(settings: EngineSettings, model_directory: str) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`.

    Log-probs are those of the processed distribution: the one a token was drawn from, temperature applied.
    """
    arguments: dict[str, Any] = {
        "model": model_directory,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enforce_eager": settings.enforce_eager,
        "trust_remote_code": settings.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        # The statistics feed the token counter and the Prometheus metrics; nothing of ours makes vLLM log them.
        "disable_log_stats": False,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if settings.reasoning_parser is not None:
        arguments["reasoning_parser"] = settings.reasoning_parser
    if settings.max_lora_rank > 0:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": lora_rank(settings.max_lora_rank),
            "max_loras": _num_slots(settings),
            "max_cpu_loras": _num_slots(settings),
        }
    if settings.weight_transfer:
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    if settings.device == "cpu":
        arguments |= cpu_arguments(settings)
    return arguments


def _num_slots(settings: EngineSettings) -> int:
    """vLLM's adapter slots. Its kernels on a CPU index the slots with -1 for rows without an adapter, where a batch has
    others too: the base model would answer with the adapter in the last slot. The lowest free slot is taken first, so
    that one more than is ever used stays empty, which is all zeros."""
    return settings.max_loras + 1 if settings.device == "cpu" else settings.max_loras


def cpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    """What differs on a CPU.

    A prompt is prefilled in one piece there: a seeded request whose prefill is split ends vLLM's CPU engine. Compiling
    takes minutes and, with an adapter, is switched off by vLLM itself.
    """
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_model_len, CPU_STEP_TOKENS),
        "kv_cache_memory_bytes": settings.kv_cache_bytes or CPU_CACHE_BYTES,
        "block_size": CPU_BLOCK_SIZE,
    }
