"""The package declares what it imports, and ships what it promises."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What DeepSpeed 0.19 knows, as far as our files use it.
ZERO_KEYS = {
    "stage",
    "overlap_comm",
    "reduce_scatter",
    "contiguous_gradients",
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
}
# What accelerate and transformers fill in; an explicit number there would contradict the YAML file.
AUTO = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
}


def distribution_name(requirement: str) -> str:
    return re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def declared(*extras: str) -> set[str]:
    project = PROJECT["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {distribution_name(requirement) for requirements in lists for requirement in requirements}


def imported_packages() -> dict[str, set[str]]:
    """Top-level package names that src/ imports, each with the files that do."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(file.name)
    return {name: files for name, files in found.items() if name not in (*sys.stdlib_module_names, "axolotl")}


def test_every_import_is_declared() -> None:
    providers = importlib.metadata.packages_distributions()
    required = declared()
    optional = declared("vllm", "deepspeed", "wandb", "liger", "math", "gym", "bitsandbytes")
    for package, files in imported_packages().items():
        names = {distribution_name(name) for name in providers.get(package, [package])} | {package}
        assert names & (required | optional), f"{package}, imported in {sorted(files)}, is not in pyproject.toml"


def test_every_dependency_has_a_floor() -> None:
    project = PROJECT["project"]
    extras = {name: items for name, items in project["optional-dependencies"].items() if name != "dev"}
    for requirement in [*project["dependencies"], *(item for items in extras.values() for item in items)]:
        assert ">=" in requirement, requirement


def test_pins_are_within_the_declared_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    pins = {
        canonicalize_name(name): version
        for name, version in (line.split("==") for line in lines if line and not line.startswith("#"))
    }
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["examples"]]:
        requirement = Requirement(text)
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{text}, pinned to {pin}"


@pytest.mark.parametrize(
    ("name", "stage", "precisions"),
    [
        ("zero1", 1, {"bf16", "fp16"}),
        ("zero2", 2, {"bf16", "fp16"}),
        ("zero3", 3, {"bf16", "fp16"}),
        ("zero3_bf16", 3, {"bf16"}),
    ],
)
def test_deepspeed_settings(name: str, stage: int, precisions: set[str]) -> None:
    settings = json.loads((ROOT / "deepspeed_configs" / f"{name}.json").read_text())
    assert settings["zero_optimization"]["stage"] == stage
    assert set(settings["zero_optimization"]) <= ZERO_KEYS
    assert set(settings) & {"bf16", "fp16"} == precisions
    assert {key for key, value in settings.items() if value == "auto"} == AUTO


def test_deepspeed_settings_are_in_the_wheel() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {"deepspeed_configs": "axolotl/deepspeed_configs"}
