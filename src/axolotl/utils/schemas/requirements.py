"""Which optional packages a training needs, and whether they are there: found, never imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import uses_server

# What pip calls a package, where it is not what Python calls it.
_PIP_NAMES = {
    "vllm": "axolotl[vllm]",
    "wandb": "axolotl[wandb]",
    "bitsandbytes": "axolotl[bitsandbytes]",
    "liger_kernel": "axolotl[liger]",
    "galore_torch": "galore-torch",
    "lomo_optim": "lomo-optim",
    "apollo_torch": "apollo-torch",
    "optimi": "torch-optimi",
}

_OPTIMIZERS = {
    "adamw_bnb_8bit": "bitsandbytes",
    "adamw_8bit": "bitsandbytes",
    "ademamix": "bitsandbytes",
    "ademamix_8bit": "bitsandbytes",
    "lion_8bit": "bitsandbytes",
    "lion_32bit": "bitsandbytes",
    "rmsprop_bnb": "bitsandbytes",
    "rmsprop_bnb_8bit": "bitsandbytes",
    "rmsprop_bnb_32bit": "bitsandbytes",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "adamw_anyprecision": "torchdistx",
    "lomo": "lomo_optim",
    "adalomo": "lomo_optim",
    "grokadamw": "grokadamw",
    "stable_adamw": "optimi",
}
_OPTIMIZER_FAMILIES = {
    "paged_": "bitsandbytes",
    "galore_": "galore_torch",
    "schedule_free_": "schedulefree",
    "apollo_": "apollo_torch",
}


def missing_packages(
    config: AxolotlConfig, reporters: Sequence[str], *, is_installed: Callable[[str], bool] | None = None
) -> dict[str, str]:
    """What pip has to install, each with the option that asks for it: `{"axolotl[wandb]": "report_to: wandb"}`.

    Args:
        reporters: where metrics go, as resolved from the options about logging.
        is_installed: asked with the name that Python imports; None looks for the package.
    """
    found = is_installed or (lambda name: importlib.util.find_spec(name) is not None)
    missing: dict[str, str] = {}
    for option, package in _needed(config, reporters):
        if not found(package):
            missing.setdefault(_PIP_NAMES.get(package, package), option)
    return missing


def _needed(config: AxolotlConfig, reporters: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option that needs a package, as it would be written, and the package's name in Python."""
    for reporter in reporters:
        yield f"report_to: {reporter}", reporter
    if package := _optimizer_package(config.optimizer):
        yield f"optimizer: {config.optimizer}", package
    if config.adapter == "qlora":
        yield "adapter: qlora", "bitsandbytes"
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, name):
            yield f"{name}: true", "bitsandbytes"
    if config.trl.use_liger_loss:
        yield "trl.use_liger_loss: true", "liger_kernel"
    if uses_server(config) and config.trl.weight_sync == "nccl":
        yield "trl.weight_sync: nccl", "vllm"


def _optimizer_package(optimizer: str) -> str | None:
    families = (package for start, package in _OPTIMIZER_FAMILIES.items() if optimizer.startswith(start))
    return _OPTIMIZERS.get(optimizer) or next(families, None)
