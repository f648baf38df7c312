"""Top-level options about optimisation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from axolotl.utils.schemas.base import Options, option
from axolotl.utils.schemas.scalars import (
    AsWord,
    Bool,
    Float,
    Free,
    Int,
    Text,
    bool_or,
    read_mapping,
    read_text,
)

Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor", "adamw_anyprecision",
    "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad", "adamw_bnb_8bit", "adamw_8bit",
    "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
    "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo", "grokadamw",
    "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise",
    "stable_adamw",
]  # fmt: skip

Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
]  # fmt: skip


def _text_or_mapping(value: object) -> object:
    return read_mapping(value) if isinstance(value, dict) else read_text(value)


class TrainingOptions(Options):
    micro_batch_size: Int = option(
        1, "Completions in one forward and backward pass of a process: the memory budget of training.", ge=1
    )
    gradient_accumulation_steps: Int = option(1, "Micro-batches in one optimizer step.", ge=1)
    num_epochs: Float = option(1.0, "Passes over the prompts; `max_steps` takes precedence.", gt=0.0)
    max_steps: Int | None = option(None, "Optimizer steps of the run; from `num_epochs` when unset.", ge=1)
    learning_rate: Float = option(1e-6, "Step size of the optimizer.", ge=0.0)
    lr_scheduler: Annotated[Scheduler, AsWord] = option("cosine", "How the learning rate changes over the run.")
    lr_scheduler_kwargs: Free | None = option(None, "Further settings of the scheduler.")
    warmup_steps: Float | None = option(
        None, "Steps over which the learning rate rises from 0; below 1, a share of the run.", ge=0.0
    )
    warmup_ratio: Float | None = option(None, "The same as a share of the run.", ge=0.0, le=1.0)
    optimizer: Annotated[Optimizer, AsWord] = option("adamw_torch_fused", "The optimizer.")
    optim_args: Annotated[str | dict[str, object], BeforeValidator(_text_or_mapping)] | None = option(
        None, "Further settings of the optimizer, as a mapping or `key=value` text."
    )
    weight_decay: Float = option(0.0, "How strongly weights are pulled to 0.", ge=0.0)
    adam_beta1: Float = option(0.9, "Memory of the gradient's mean.", ge=0.0, lt=1.0)
    adam_beta2: Float = option(0.999, "Memory of the gradient's square.", ge=0.0, lt=1.0)
    adam_epsilon: Float = option(1e-8, "Keeps the optimizer's division from blowing up.", gt=0.0)
    max_grad_norm: Float = option(1.0, "Gradients longer than this are scaled down; 0 is off.", ge=0.0)
    seed: Int = option(42, "Seed of everything random in the run.", ge=0, lt=2**32)
    bf16: Annotated[bool | Literal["auto"], BeforeValidator(bool_or("auto"))] = option(
        "auto", "Compute in bfloat16; `auto` where the device is fast at it."
    )
    fp16: Bool = option(False, "Compute in float16 with loss scaling.")
    tf32: Annotated[bool | Literal["auto"], BeforeValidator(bool_or("auto"))] = option(
        "auto", "Let float32 products use TF32 on NVIDIA devices; `auto` leaves it to PyTorch."
    )
    fp8: Bool = option(False, "Train in 8-bit floating point.")
    gradient_checkpointing: Annotated[
        bool | Literal["offload", "offload_disk"], BeforeValidator(bool_or("offload", "offload_disk"))
    ] = option(False, "Recompute activations in the backward pass to save memory.")
    gradient_checkpointing_kwargs: Free | None = option(
        None, "Settings of gradient checkpointing, such as `use_reentrant: false`."
    )
    torch_compile: Annotated[bool | Literal["auto"], BeforeValidator(bool_or("auto"))] = option(
        False, "Compile the model; `auto` leaves it off."
    )
    torch_compile_backend: Text | None = option(None, "Backend of `torch.compile`.")
    torch_compile_mode: Text | None = option(None, "Mode of `torch.compile`.")
    neftune_noise_alpha: Float | None = option(None, "Strength of noise added to embeddings while training.", ge=0.0)
