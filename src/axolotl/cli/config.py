"""A YAML file and command line overrides to a checked, fully resolved config; every problem is reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from axolotl.cli.source import read_file, read_tree, read_value
from axolotl.errors import ConfigError
from axolotl.utils.schemas import rules
from axolotl.utils.schemas.availability import Command
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.legacy import fold
from axolotl.utils.schemas.nodes import Node, Problem, dotted
from axolotl.utils.schemas.nodes import Path as KeyPath
from axolotl.utils.schemas.resolve import resolve
from axolotl.utils.schemas.scalars import Plain, read_free
from axolotl.utils.schemas.validate import independent, validate


@dataclass(frozen=True)
class LoadedConfig:
    """warnings: one line for each older or meaningless key, to be shown to the user once."""

    config: AxolotlConfig
    path: Path
    warnings: tuple[str, ...]


def load_config(
    path: str | Path,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    purpose: Command = "train",
    own_flags: Sequence[str] = (),
) -> LoadedConfig:
    """Reads, overrides, checks and resolves.

    Args:
        overrides: `("trl.num_generations", "4")` pairs; values are read by the rules of the file.
        purpose: `vllm-serve` leaves out the rules about data, rewards and batches.
        own_flags: flags of the command itself, to suggest when an unknown one resembles them.

    Raises:
        ConfigError: with every problem in `details`, in the order of the lines.
    """
    path = Path(path)
    root, problems = read_tree(read_file(path), str(path))
    for key, text in overrides:
        problems += _override(root, key, text)
    config, more, warnings = _check(root, purpose, own_flags)
    problems += more
    if problems or config is None:
        raise _failure(problems, root, str(path))
    config = _with_local_paths(config, path.resolve().parent)
    return LoadedConfig(config, path, tuple(_lines(warnings, root, str(path))))


def config_from_mapping(data: Mapping[str, Any], *, purpose: Command = "train") -> AxolotlConfig:
    """The same checks and resolution for a config built in code."""
    root = _node(data)
    config, problems, _ = _check(root, purpose)
    if problems or config is None:
        raise _failure(problems, root, "config")
    return config


def dump_config(config: AxolotlConfig) -> str:
    """The config as YAML that loads to the same config without warnings."""
    data = config.model_dump()
    data["special_tokens"] = {name: token for name, token in data["special_tokens"].items() if token is not None}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _with_local_paths(config: AxolotlConfig, base_dir: Path) -> AxolotlConfig:
    """Model and tokenizer as every command finds them: `~` replaced, absolute where they are only beside the config.

    `output_dir` has its `~` replaced too: transformers would do it for some of what the run writes.
    """
    given = {name: getattr(config, name) for name in ("base_model", "tokenizer_config")}
    found = {name: _local_path(value, base_dir) for name, value in given.items() if value is not None}
    if config.output_dir.startswith("~"):
        found["output_dir"] = str(Path(config.output_dir).expanduser())
    return config.model_copy(update=found)


def _local_path(name: str, base_dir: Path) -> str:
    """A name that is no path here is left as it is: the hub may know it."""
    path = Path(name).expanduser()
    if not path.exists() and (base_dir / path).exists():
        return str(base_dir / path)
    return str(path) if name.startswith("~") else name


def _check(
    root: Node, purpose: Command, own_flags: Sequence[str] = ()
) -> tuple[AxolotlConfig | None, list[Problem], list[Problem]]:
    problems, warnings = fold(root)
    validated = validate(root, own_flags)
    problems += validated.problems
    warnings += validated.warnings
    if validated.config is None:
        return None, problems, warnings
    broken = [problem for rule in rules.AS_WRITTEN for problem in rule(validated.config)]
    config = resolve(validated.config)
    for rule in rules.COMMON + (rules.TRAINING if purpose == "train" else ()):
        broken += rule(config)
    return config, problems + independent(broken, problems), warnings


def _override(root: Node, key: str, text: str) -> list[Problem]:
    """Puts one flag's value into the tree."""
    flag = f"--{key}"
    node, problems = read_value(text, flag)
    path = _split(key)
    parent = root
    for depth, part in enumerate(path[:-1]):
        child = parent.find((part,))
        if child is None or child.value is None:
            if isinstance(part, int) or isinstance(parent.value, list):
                return [Problem(path, f"there is no entry {part}", node)]
            child = Node({}, 1, flag)
            parent.value[part] = child
        if not isinstance(child.value, (dict, list)):
            return [Problem(path, f"{dotted(path[: depth + 1])} has no options of its own", node)]
        parent = child
    last = path[-1]
    if isinstance(parent.value, list) and (not isinstance(last, int) or last >= len(parent.value)):
        return [Problem(path, f"there is no entry {last}", node)]
    parent.value[last] = node
    return problems


def _split(key: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _failure(problems: Iterable[Problem], root: Node, name: str) -> ConfigError:
    problems = list(problems)
    details = _lines(problems, root, name)
    codes = {problem.code for problem in problems}
    count = "1 problem" if len(details) == 1 else f"{len(details)} problems"
    return ConfigError(
        f"{count} in {name}",
        code=codes.pop() if len(codes) == 1 else None,
        why="listed above, one a line",
        do="correct them and check again with: axolotl check " + name,
        details=tuple(details),
    )


def _lines(problems: Iterable[Problem], root: Node, name: str) -> list[str]:
    """`file:line key: message`, or `--flag: message`, in the order of the file; each once."""
    placed = []
    for problem in problems:
        node = problem.node or root.nearest(problem.path)
        key = dotted(problem.path)
        if node is None:
            placed.append((0, f"{name} {key}: {problem.message}"))
        elif node.flag is not None:
            same = node.flag == f"--{key}"
            placed.append((0, f"{node.flag}: {'' if same else key + ' '}{problem.message}"))
        else:
            where = f"{name}:{node.line}" if node.line else name
            placed.append((node.line, f"{where} {key}: {problem.message}"))
    return list(dict.fromkeys(line for _, line in sorted(placed, key=lambda item: item[0])))


def _node(value: Any) -> Node:
    if isinstance(value, Mapping):
        return Node({key: _node(item) for key, item in value.items()}, 0)
    if isinstance(value, (list, tuple)):
        return Node([_node(item) for item in value], 0)
    return Node(value, 0)


class _Dumper(yaml.SafeDumper):
    """Quotes text that our reader would take for something else; PyYAML knows older rules."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    needs_quotes = value == "None" or not isinstance(read_free(Plain(value)), str) if _is_finite_text(value) else True
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if needs_quotes else None)


def _is_finite_text(value: str) -> bool:
    try:
        read_free(Plain(value))
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _text)
