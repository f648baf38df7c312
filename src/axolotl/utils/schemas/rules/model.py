"""How the model is loaded and adapted."""

from __future__ import annotations

from axolotl.utils.schemas.adapter import INITS_OF_BASE
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.nodes import Problem


def one_attention(config: AxolotlConfig) -> list[Problem]:
    """At most one way of choosing the attention kernel."""
    switches = ("flash_attention", "sdp_attention", "eager_attention")
    chosen = [name for name in switches if getattr(config, name)]
    if config.attn_implementation is not None:
        chosen.append("attn_implementation")
    if len(chosen) < 2:
        return []
    return [Problem((chosen[-1],), f"cannot be combined with {', '.join(chosen[:-1])}; keep one of them")]


def one_number_format(config: AxolotlConfig) -> list[Problem]:
    if config.bf16 is True and config.fp16:
        return [Problem(("fp16",), "cannot be combined with bf16: true; keep one of them")]
    return []


def one_quantization(config: AxolotlConfig) -> list[Problem]:
    """A quantised base is frozen, so it needs an adapter; and it is in 4 bits or in 8."""
    problems = []
    if config.load_in_4bit and config.load_in_8bit:
        problems.append(Problem(("load_in_8bit",), "cannot be combined with load_in_4bit; keep one of them"))
    if config.adapter == "qlora" and config.load_in_8bit:
        problems.append(Problem(("load_in_8bit",), "cannot be combined with adapter: qlora, which is 4-bit"))
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, name) and config.adapter is None:
            message = "needs an adapter, since quantised weights cannot be trained; set adapter"
            problems.append(Problem((name,), message))
    return problems


def head_has_no_adapter(config: AxolotlConfig) -> list[Problem]:
    """TRL multiplies by the head's plain weight, so that an adapter on it would never be trained."""
    if "lm_head" not in target_names(config):
        return []
    return [Problem(("lora_target_modules",), "cannot hold lm_head, whose adapter would never be trained; remove it")]


def target_names(config: AxolotlConfig) -> list[str]:
    """The modules that are adapted, without the path to them."""
    targets = config.lora_target_modules
    names = [targets] if isinstance(targets, str) else targets or []
    return [name.rsplit(".", 1)[-1] for name in names]


def no_plugins(config: AxolotlConfig) -> list[Problem]:
    if not config.plugins:
        return []
    return [Problem(("plugins",), f"are not supported; remove {', '.join(config.plugins)}")]


def changes_base(config: AxolotlConfig) -> bool:
    """Whether the adapter begins by taking a part out of the base model's weights."""
    init = config.peft_init_lora_weights
    return isinstance(init, str) and init.startswith(INITS_OF_BASE)
