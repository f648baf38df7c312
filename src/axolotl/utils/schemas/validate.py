"""The tree as written to an `AxolotlConfig`, with pydantic's findings put into our words."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.lookup import unknown_key
from axolotl.utils.schemas.nodes import Node, Path, Problem
from axolotl.utils.schemas.scalars import show

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}

_NO_TOKEN = ("pad_token", "eos_token", "bos_token", "unk_token")


def validate(root: Node) -> tuple[AxolotlConfig | None, list[Problem], list[Problem]]:
    """The config as written, problems and warnings; the config is None when there are problems with its options."""
    problems, warnings = _special_tokens(root)
    try:
        config = AxolotlConfig.model_validate(root.plain())
    except ValidationError as error:
        return None, problems + [_problem(finding) for finding in error.errors(include_url=False)], warnings
    return config, problems, warnings


def _special_tokens(root: Node) -> tuple[list[Problem], list[Problem]]:
    """A token of nothing: `<` and `#` begin YAML's own signs, so an unquoted token is easily lost."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    section = root.find(("special_tokens",))
    for key, node in section.keys() if section is not None else ():
        path: Path = ("special_tokens", key)
        if node.value is None and key in _NO_TOKEN:
            problems.append(Problem(path, 'has no value; quote the token: "<|endoftext|>", or remove the line'))
        elif node.value == "" and key == "pad_token":
            warnings.append(Problem(path, "is empty, so it counts as unset and the tokenizer's own is used"))
        elif node.value == "" and key in _NO_TOKEN:
            problems.append(Problem(path, "is empty; name a token, or remove the line"))
    return problems, warnings


def _problem(finding: Any) -> Problem:
    kind, path, given = finding["type"], finding["loc"], finding.get("input")
    context = finding.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(path, unknown_key(path))
    if kind == "missing":
        return Problem(path, _required(path))
    if kind == "value_error":
        return Problem(path, str(context["error"]))
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return Problem(path, f"must be {words} {context[bound]:g}, not {show(given)}")
    if kind == "literal_error":
        return Problem(path, _choice(given, context["expected"]))
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(path, f"needs options of its own, one `key: value` a line below it, not {show(given)}")
    if kind == "list_type":
        return Problem(path, f"needs a list of `- ` entries, not {show(given)}")
    if kind == "string_too_short":
        return Problem(path, "must not be empty")
    return Problem(path, f"{finding['msg']}, not {show(given)}")


def _required(path: Path) -> str:
    if path == ("rl",):
        return "is required: set rl: grpo"
    return "is required"


def _choice(given: object, expected: str) -> str:
    choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
    message = f"must be one of {', '.join(choices)}, not {show(given)}"
    close = difflib.get_close_matches(str(given), choices, n=1)
    return f"{message}. Did you mean {close[0]}?" if close else message
