"""Spellings of public configs that are not ours, and what becomes of each. Works on the tree as written, which knows
the lines."""

from __future__ import annotations

from axolotl.utils.schemas.nodes import Node, Path, Problem, dotted

RENAMED: dict[Path, Path] = {
    ("trl", "vllm_gpu_memory_utilization"): ("vllm", "gpu_memory_utilization"),
    ("trl", "vllm_max_model_len"): ("vllm", "max_model_len"),
    ("trl", "vllm_max_model_length"): ("vllm", "max_model_len"),
    ("trl", "vllm_tensor_parallel_size"): ("vllm", "tensor_parallel_size"),
    ("trl", "vllm_dtype"): ("vllm", "dtype"),
    ("trl", "vllm_device"): ("vllm", "device"),
    ("trl", "vllm_structured_outputs_regex"): ("trl", "vllm_guided_decoding_regex"),
    ("lr_scheduler_type",): ("lr_scheduler",),
    ("rl_beta",): ("trl", "beta"),
    ("trl", "max_prompt_length"): ("sequence_len",),
    ("chat_template_jinja",): ("chat_template",),
    ("noisy_embedding_alpha",): ("neftune_noise_alpha",),
    ("deepspeed_config_path",): ("deepspeed",),
    ("revision",): ("revision_of_model",),
}

NO_EFFECT: frozenset[Path] = frozenset(
    {
        ("vllm", "enable_reasoning"),
        *(
            (key,)
            for key in (
                "accelerator_config",
                "dataloader_drop_last",
                "dataloader_num_workers",
                "dataloader_pin_memory",
                "dataloader_prefetch_factor",
                "dataset_num_proc",
                "dataset_processes",
                "debug",
                "eval_batch_size",
                "eval_max_new_tokens",
                "eval_sample_packing",
                "eval_table_size",
                "flash_attn_cross_entropy",
                "flash_attn_fuse_mlp",
                "flash_attn_rms_norm",
                "gc_steps",
                "gpu_memory_limit",
                "group_by_length",
                "include_tokens_per_second",
                "is_falcon_derived_model",
                "is_llama_derived_model",
                "is_mistral_derived_model",
                "is_qwen_derived_model",
                "local_rank",
                "lora_fan_in_fan_out",
                "lora_mlp_kernel",
                "lora_o_kernel",
                "lora_on_cpu",
                "lora_qkv_kernel",
                "model_type",
                "pad_to_sequence_len",
                "remove_unused_columns",
                "roles_to_train",
                "s2_attention",
                "sample_packing",
                "sample_packing_eff_est",
                "save_safetensors",
                "strict",
                "tokenizer_legacy",
                "tokenizer_type",
                "tokenizer_use_fast",
                "total_num_tokens",
                "train_on_eos",
                "train_on_inputs",
                "xformers_attention",
            )
        ),
    }
)

# Declared options whose value is said to be superfluous, once, and dropped.
NOT_NEEDED: dict[Path, str] = {
    ("vllm", "worker_extension_cls"): "is not needed: this server takes adapters without an extension",
}

# First words of top-level keys that only a plugin of the upstream project knows.
PLUGIN_PREFIXES = {
    "atropos": "plugin_atropos",
    "cut_cross_entropy": "axolotl.integrations.cut_cross_entropy",
    "grokfast": "axolotl.integrations.grokfast",
    "kd": "axolotl.integrations.kd",
    "liger": "axolotl.integrations.liger",
    "llmcompressor": "axolotl.integrations.llm_compressor",
    "lm_eval": "axolotl.integrations.lm_eval",
    "spectrum": "axolotl.integrations.spectrum",
}


def fold(root: Node) -> tuple[list[Problem], list[Problem]]:
    """Brings older keys of the tree, in place, to today's.

    Returns:
        problems: both spellings given, or a key of a plugin. warnings: one for each key that was moved or left out.
        Their paths are those of the older keys, and they carry the node that stood there.
    """
    problems: list[Problem] = []
    warnings: list[Problem] = []
    for old, new in RENAMED.items():
        node = _take(root, old)
        if node is None:
            continue
        if node.value is not None and (today := root.find(new)) is not None and today.value is not None:
            message = f"is an older name of {dotted(new)}, which is set too; keep one of them"
            problems.append(Problem(old, message, node))
            continue
        warnings.append(Problem(old, f"is an older name; today's key is {dotted(new)}", node))
        if node.value is not None:
            _put(root, new, node)
    for path in sorted(NO_EFFECT, key=dotted):
        if (node := _take(root, path)) is not None:
            warnings.append(Problem(path, "has no effect here", node))
    for path, message in NOT_NEEDED.items():
        if (node := root.find(path)) is not None and node.value is not None:
            _take(root, path)
            warnings.append(Problem(path, message, node))
    for key in [key for key, _ in root.entries() if plugin_of(key) is not None]:
        node = _take(root, (key,))
        message = f"belongs to the plugin {plugin_of(key)}, and plugins are not supported"
        problems.append(Problem((key,), message, node))
    return problems, warnings


def plugin_of(key: str) -> str | None:
    """The plugin that a top-level key belongs to, or None."""
    for prefix, plugin in PLUGIN_PREFIXES.items():
        if key == prefix or key.startswith(f"{prefix}_"):
            return plugin
    return None


def _take(root: Node, path: Path) -> Node | None:
    parent = root.find(path[:-1])
    if parent is None or not isinstance(parent.value, dict):
        return None
    taken: Node | None = parent.value.pop(path[-1], None)
    return taken


def _put(root: Node, path: Path, node: Node) -> None:
    *sections, key = path
    parent = root
    for section in sections:
        child = parent.value.get(section)
        if child is None or child.value is None:
            child = Node({}, node.line, node.flag)
            parent.value[section] = child
        if not isinstance(child.value, dict):
            return
        parent = child
    parent.value[key] = node
