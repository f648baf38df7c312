"""The tree as written to an `AxolotlConfig`, with pydantic's findings put into our words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.lookup import option_names, unknown_key
from axolotl.utils.schemas.nodes import Node, Path, Problem
from axolotl.utils.schemas.scalars import Plain, show

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}

# For required options, so that the rules can look at the rest of a config that lacks them.
_STAND_INS = {"rl": "grpo", "base_model": "missing", "path": "missing"}

_TOKENS = ("pad_token", "eos_token", "bos_token", "unk_token")


@dataclass(frozen=True)
class Validated:
    """config: the config as written; where problems stand in the way, with those options left at their defaults, so
    that the rules can still look at the rest. problems, warnings: what was found."""

    config: AxolotlConfig | None
    problems: list[Problem]
    warnings: list[Problem]


def validate(root: Node, own_flags: Sequence[str] = ()) -> Validated:
    """Checks every option by itself. `own_flags` are further words to suggest for an unknown command line flag."""
    problems, warnings = _special_tokens(root)
    data = root.plain()
    try:
        return Validated(AxolotlConfig.model_validate(data), problems, warnings)
    except ValidationError as error:
        findings: list[Any] = error.errors(include_url=False)
    for finding in findings:
        node = root.find(finding["loc"])
        is_flag = node is not None and node.flag is not None
        problems.append(_problem(finding, own_flags if is_flag else ()))
        _set_aside(data, finding)
    try:
        return Validated(AxolotlConfig.model_validate(data), problems, warnings)
    except ValidationError:
        return Validated(None, problems, warnings)


def _set_aside(data: Any, finding: Any) -> None:
    """Takes the option of a finding out of the data, or puts a stand-in where it is required."""
    *parents, key = finding["loc"]
    for part in parents:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return
    if not isinstance(data, dict):
        return
    data.pop(key, None)
    if key in _STAND_INS:
        data[key] = _STAND_INS[key]


def independent(found: Iterable[Problem], known: Iterable[Problem]) -> list[Problem]:
    """Those problems of `found` that speak of no option that a problem of `known` speaks of: the others may only be
    consequences."""
    spoken = set().union(*(_options_in(problem) for problem in known))
    return [problem for problem in found if not _options_in(problem) & spoken]


def _options_in(problem: Problem) -> set[str]:
    words = set(re.findall(r"\w+", problem.message)) | {part for part in problem.path if isinstance(part, str)}
    return words & option_names()


def _special_tokens(root: Node) -> tuple[list[Problem], list[Problem]]:
    """A token of nothing: `<` and `#` begin YAML's own signs, so an unquoted token is easily lost."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    section = root.find(("special_tokens",))
    for key, node in section.entries() if section is not None else ():
        path: Path = ("special_tokens", key)
        if node.value is None and key in _TOKENS:
            problems.append(Problem(path, 'has no value; quote the token: "<|endoftext|>", or remove the line'))
        elif node.value == "" and key == "pad_token":
            warnings.append(Problem(path, "is empty, so it counts as unset and the tokenizer's own is used"))
        elif node.value == "" and key in _TOKENS:
            problems.append(Problem(path, "is empty; name a token, or remove the line"))
    return problems, warnings


def _problem(finding: Any, own_flags: Sequence[str]) -> Problem:
    kind, path, given = finding["type"], finding["loc"], finding.get("input")
    context = finding.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(path, unknown_key(path, extra=own_flags))
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
    message = f"must be one of {', '.join(choices)}, not {show(Plain(given) if isinstance(given, str) else given)}"
    close = difflib.get_close_matches(str(given), choices, n=1)
    return f"{message}. Did you mean {close[0]}?" if close else message
