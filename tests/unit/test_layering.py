"""Imports go one way, and what must start fast starts without the heavy libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
GRPO = "axolotl.core.trainers.grpo"

# From the top to the bottom. A module belongs to the unit with the longest matching name. It may import from its own
# unit and from the layers below; units of one layer do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("axolotl.cli",),
    ("axolotl.scripts",),
    ("axolotl.core.builders",),
    ("axolotl.core.run",),
    (f"{GRPO}.assembly",),
    (f"{GRPO}.trainer",),
    (f"{GRPO}.pipeline", f"{GRPO}.nonfinite"),
    (f"{GRPO}.microbatch", f"{GRPO}.replaying", f"{GRPO}.open_rollout"),
    (f"{GRPO}.scoring",),
    (
        f"{GRPO}.rollout",
        f"{GRPO}.generation",
        f"{GRPO}.weight_sync",
        f"{GRPO}.rewards",
        "axolotl.data",
        "axolotl.loaders",
        "axolotl.health",
    ),
    (
        f"{GRPO}.metrics",
        f"{GRPO}.sampler",
        f"{GRPO}.args",
        f"{GRPO}.specs",
        f"{GRPO}.schedule",
        f"{GRPO}.protocols",
        f"{GRPO}.ledger",
        f"{GRPO}.memory",
    ),
    (
        f"{GRPO}.types",
        f"{GRPO}.span",
        f"{GRPO}.algo",
        f"{GRPO}.distributed",
        "axolotl.serving",
        "axolotl.core.run.checkpoints",
    ),
    ("axolotl.utils.schemas",),
    ("axolotl.utils", "axolotl.failpoints"),
    ("axolotl.errors",),
)
PACKAGES_ONLY = {"axolotl", "axolotl.core", "axolotl.core.trainers", GRPO}

# Modules that may name a library; everyone else goes through them.
OWNERS = {
    "trl": (f"{GRPO}.trainer", f"{GRPO}.assembly"),
    "vllm": ("axolotl.serving.engines", f"{GRPO}.weight_sync.nccl"),
    "httpx": ("axolotl.serving", "axolotl.utils.hub"),
    "fastapi": ("axolotl.serving", "axolotl.scripts"),
    "torch.distributed": (f"{GRPO}.distributed",),
    "fire": ("axolotl.cli",),
}

LIGHT = ("torch", "transformers", "trl", "peft", "datasets", "vllm")


@cache
def modules() -> dict[str, Path]:
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Every name that the module imports, at its top, inside functions and for type checking alike."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the direction"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def place(module: str) -> tuple[int, str] | None:
    """Layer number and unit of a module; None for one that no unit holds."""
    matches = [(i, unit) for i, layer in enumerate(LAYERS) for unit in layer if is_within(module, unit)]
    return max(matches, key=lambda match: len(match[1]), default=None)


def violations(module: str, imported: frozenset[str]) -> list[str]:
    here = place(module)
    if here is None:
        return [] if module in PACKAGES_ONLY else [f"{module} stands in no layer: give it a place in LAYERS"]
    found = []
    for name in sorted(imported):
        there = place(name)
        if there and there[1] != here[1] and there[0] <= here[0]:
            found.append(f"{module} imports {name}, which is not below it")
    return found


def test_imports_point_downwards() -> None:
    found = [problem for module in modules() for problem in violations(module, imports(module))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "imported", "is_fine"),
    [
        (f"{GRPO}.trainer", f"{GRPO}.pipeline.RolloutPipeline", True),
        (f"{GRPO}.pipeline", f"{GRPO}.trainer.AxolotlGRPOTrainer", False),
        (f"{GRPO}.rollout.producer", f"{GRPO}.rollout.seeds.completion_seed", True),
        (f"{GRPO}.rollout.producer", f"{GRPO}.generation.server.ServerBackend", False),
        ("axolotl.utils.schemas.trl", "axolotl.errors.ConfigError", True),
        ("axolotl.errors", "axolotl.utils.schemas.trl", False),
        ("axolotl.nowhere", "axolotl.errors", False),
        ("axolotl.errors", "json", True),
    ],
)
def test_the_rule_itself(module: str, imported: str, is_fine: bool) -> None:
    assert (not violations(module, frozenset({imported}))) == is_fine


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_is_named_by_its_owners_only(library: str) -> None:
    strangers = [
        module
        for module in modules()
        if any(is_within(name, library) for name in imports(module))
        and not any(is_within(module, owner) for owner in OWNERS[library])
    ]
    assert not strangers, f"{strangers} import {library}"


def test_the_maths_is_pure() -> None:
    allowed = (*sys.stdlib_module_names, "torch", f"{GRPO}.algo")
    for module in modules():
        if is_within(module, f"{GRPO}.algo"):
            foreign = [name for name in imports(module) if not any(is_within(name, package) for package in allowed)]
            assert not foreign, f"{module} imports {foreign}"


def light_modules() -> list[str]:
    names = ["axolotl.errors", "axolotl.cli.main", "axolotl.cli.train", "axolotl.cli.vllm_serve"]
    names += ["axolotl.serving.wire", "axolotl.serving.client", "axolotl.serving.supervisor"]
    names += ["axolotl.cli.resume", "axolotl.cli.verify_checkpoint"]
    return names + [module for module in modules() if is_within(module, "axolotl.utils.schemas")]


def test_the_command_line_and_the_schemas_start_without_heavy_libraries() -> None:
    code = "\n".join(f"import {name}" for name in light_modules())
    code += f"\nimport sys; print(*sorted(set({LIGHT!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
