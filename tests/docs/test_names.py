"""Every option, route, command, target, metric, exit code and error code that the docs name exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from axolotl import errors
from axolotl.cli.invocation import OWN_FLAGS
from axolotl.utils.schemas import legacy
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.datasets import DatasetConfig
from axolotl.utils.schemas.model import SpecialTokens
from axolotl.utils.schemas.trl import TRLConfig
from axolotl.utils.schemas.vllm import VllmConfig
from tests.docs.pages import ROOT, blocks, code_words, name, pages, prose

SECTIONS: dict[str, type[BaseModel]] = {
    "trl": TRLConfig,
    "vllm": VllmConfig,
    "datasets": DatasetConfig,
    "special_tokens": SpecialTokens,
}
INSIDE_FREE_MAPPINGS = {"use_reentrant", "enable_thinking"}
TRL_TRAINER = "trl/trainer/grpo_trainer.py"


@cache
def options() -> frozenset[str]:
    """Every key by itself, and with its section in front."""
    found = set(AxolotlConfig.model_fields)
    for section, model in SECTIONS.items():
        found.update(model.model_fields, (f"{section}.{key}" for key in model.model_fields))
    return frozenset(found | {".".join(path) for path in legacy.RENAMED})


@cache
def source() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


@pytest.mark.parametrize("page", pages(), ids=name)
def test_options_exist(page: Path) -> None:
    """`section.key`, `key: value` and `--flag` in backticks."""
    unknown = []
    for word in code_words(page):
        key = None
        if match := re.fullmatch(r"(trl|vllm)\.(\w+)(:.*)?", word):
            key = f"{match[1]}.{match[2]}"
        elif match := re.fullmatch(r"([a-z]\w+): .*", word):
            key = match[1]
        elif (match := re.match(r"--([\w.-]+)", word)) and match[1].replace("-", "_") not in own_flags():
            key = re.sub(r"\.\d+\.", ".", match[1])
        if key is not None and key not in options() | INSIDE_FREE_MAPPINGS:
            unknown.append(word)
    assert not unknown


def own_flags() -> set[str]:
    return {flag for flags in OWN_FLAGS.values() for flag in flags} | {"help", "version", "no_deps"}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_first_columns_of_option_tables_are_options(page: Path) -> None:
    assert not [word for word in first_column(page, "option") if word not in options()]


@pytest.mark.parametrize("page", pages(), ids=name)
def test_first_columns_of_metric_tables_are_logged(page: Path) -> None:
    import importlib.util

    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations
    trl = (Path(next(iter(spec.submodule_search_locations))).parent / TRL_TRAINER).read_text()
    for word in first_column(page, "metric"):
        if word in ("loss", "grad_norm", "learning_rate"):  # transformers' own
            continue
        pattern = re.sub(r"<\w+>", "{[^}]*}", word)
        assert re.search(f'"{pattern}"', trl + source()), f"nobody logs {word}"


def first_column(page: Path, title: str) -> list[str]:
    """The words in backticks in the first column of tables whose first column has this title."""
    words: list[str] = []
    inside = False
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            inside = False
        elif cells[0].lower() == title:
            inside = True
        elif inside:
            words += re.findall(r"`([^`]+)`", cells[0])
    return words


@cache
def routes() -> frozenset[str]:
    from axolotl.serving.app import ServerState, build_app

    app: Any = build_app(ServerState(instance_id="docs", token="docs", sync_dir=Path(), max_held=1))
    return frozenset(f"{method} {route.path}" for route in app.routes for method in route.methods)


@pytest.mark.parametrize("page", pages(), ids=name)
def test_routes_exist(page: Path) -> None:
    paths = {route.split()[1] for route in routes()}
    for word in code_words(page):
        if re.fullmatch(r"(GET|POST) /\S+", word):
            assert word in routes()
        elif re.fullmatch(r"/\w+/", word):
            assert word in paths


def test_every_route_is_documented() -> None:
    described = first_column(ROOT / "docs" / "vllm_serving.qmd", "route")
    assert sorted(described) == sorted(routes())


def exit_codes() -> dict[int, str]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AxolotlError)]
    base = (errors.AxolotlError, errors.Interrupted)
    return {kind.exit_code: kind.__name__ for kind in kinds if kind not in base} | {0: "", 130: "", 143: ""}


def test_the_table_of_exit_codes_is_complete() -> None:
    written = {int(word) for word in first_column(ROOT / "docs" / "errors.qmd", "code") if word.isdigit()}
    assert written == set(exit_codes())


@pytest.mark.parametrize("page", pages(), ids=name)
def test_exit_codes_exist(page: Path) -> None:
    named = {int(code) for code in re.findall(r"exit(?:s with)? code (\d+)", prose(page), re.IGNORECASE)}
    assert named <= set(exit_codes())


def test_error_codes_are_those_of_the_source() -> None:
    """Pages name codes that exist, and docs/errors.qmd names all of them."""
    pattern = r"E-[A-Z]+-\d\d"
    known = set(re.findall(pattern, source()))
    for page in pages():
        assert set(re.findall(pattern, page.read_text())) <= known, name(page)
    assert set(re.findall(pattern, (ROOT / "docs" / "errors.qmd").read_text())) == known


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.place)
def test_shell_commands_exist(block: Any) -> None:
    """Every line starts with something we know, and names a command, a target or a file that exists."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in block.text.splitlines():
        words = [word for word in line.split("#")[0].split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if not words or words == [".", ".venv/bin/activate"]:
            continue
        if words[0] == "axolotl":
            assert words[1] in {*OWN_FLAGS, "--help", "--version"}, line
            flags = [re.sub(r"=.*", "", word[2:]) for word in words[2:] if word.startswith("--")]
            assert all(flag.replace("-", "_") in own_flags() or flag in options() for flag in flags), line
        elif words[0] == "make":
            assert all(word in targets for word in words[1:] if "=" not in word and not word.startswith('"')), line
        else:
            assert words[0] in ("pip", "git", "cd", "python", ".venv/bin/python", ".venv/bin/pre-commit"), line
