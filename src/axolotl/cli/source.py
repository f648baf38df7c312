"""YAML text to a tree of nodes that know their lines: no tags, no code, no surprises, bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from axolotl.errors import ConfigError
from axolotl.utils.schemas.nodes import Node, Problem
from axolotl.utils.schemas.nodes import Path as KeyPath
from axolotl.utils.schemas.scalars import NULL_WORDS, Plain

MAX_BYTES = 1_000_000
MAX_NODES = 10_000
MAX_ALIASES = 100
MAX_DEPTH = 50

_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge")
)


def read_file(path: Path) -> str:
    """The text of the config file.

    Raises:
        ConfigError: it is missing, a directory, unreadable, too large or not UTF-8.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", do="name the YAML file in it")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"config file {path} does not exist", why=f"looked in {Path.cwd()}", do="check the path"
        ) from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read", why=str(error)) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has {len(data)} bytes; a config may have {MAX_BYTES}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", why=str(error)) from None


def read_tree(text: str, name: str) -> tuple[Node, list[Problem]]:
    """The mapping that `text` holds.

    Args:
        name: what to call the text in errors, usually the file's path.

    Returns:
        The tree, and a problem for each repeated key, bad key or tag; the first of repeated keys is kept.

    Raises:
        ConfigError: no YAML, too large, empty, or not a mapping.
    """
    try:
        _check_size(text, name)
        root = _yaml().compose(text)
    except MarkedYAMLError as error:
        raise _syntax_error(error, name) from None
    except (YAMLError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError(f"{name} is not valid YAML: {what}") from None
    if root is None or (root.id == "scalar" and root.value in NULL_WORDS):
        raise ConfigError(f"{name} is empty", do="see docs/grpo.qmd for a first config")
    if root.id != "mapping":
        raise ConfigError(f"{name} must hold `key: value` lines", why=f"its top level is a {root.id}")
    builder = _Builder(name)
    return builder.build(root, 1, ()), builder.problems


def read_value(text: str, flag: str) -> tuple[Node, list[Problem]]:
    """The value of a command line flag: quotes, brackets and braces mean what they mean in the file; anything else
    is taken as it stands, `#` and `:` included."""
    if text[:1] in ("[", "{", '"', "'"):
        try:
            _check_size(text, flag)
            root = _yaml().compose(text)
        except (YAMLError, RecursionError) as error:
            what = getattr(error, "problem", None) or "nested too deeply"
            raise ConfigError(f"{flag}: {text} is not valid YAML: {what}") from None
        builder = _Builder(flag, flag)
        return builder.build(root, 1, ()), builder.problems
    return Node(None if text in NULL_WORDS else Plain(text), 1, flag), []


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


def _check_size(text: str, name: str) -> None:
    """Counts while the text is being scanned, so that a hostile one is not read to its end."""
    nodes = aliases = depth = 0
    for event in _yaml().parse(text):
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        nodes += kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent")
        aliases += kind == "AliasEvent"
        if nodes > MAX_NODES:
            raise ConfigError(f"{name} has more than {MAX_NODES} values")
        if aliases > MAX_ALIASES:
            raise ConfigError(f"{name} has more than {MAX_ALIASES} aliases")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{name} is nested more than {MAX_DEPTH} levels deep")


class _Builder:
    """Turns composed nodes into ours, counting them, since aliases may multiply."""

    def __init__(self, name: str, flag: str | None = None) -> None:
        self.name = name
        self.flag = flag
        self.problems: list[Problem] = []
        self._count = 0

    def build(self, node: Any, line: int, path: KeyPath) -> Node:
        self._count += 1
        if self._count > MAX_NODES:
            raise ConfigError(f"{self.name} has more than {MAX_NODES} values once its aliases are expanded")
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{self.name} is nested more than {MAX_DEPTH} levels deep")
        tag = str(node.tag or "")
        if tag and tag not in _PLAIN_TAGS:
            self._report(path, line, f"tag {tag} is not allowed; quote a value that begins with !")
        if node.id == "mapping":
            return Node(dict(self._entries(node, path)), line, self.flag)
        if node.id == "sequence":
            items = [self.build(item, item.start_mark.line + 1, (*path, i)) for i, item in enumerate(node.value)]
            return Node(items, line, self.flag)
        if node.style is not None:
            return Node(str(node.value), line, self.flag)
        return Node(None if node.value in NULL_WORDS else Plain(node.value), line, self.flag)

    def _entries(self, node: Any, path: KeyPath) -> Iterator[tuple[str, Node]]:
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value)
            if key_node.id != "scalar":
                self._report(path, line, f"has a {key_node.id} as a key; a key is a word")
            elif key == "<<":
                self._report((*path, key), line, "merging is not supported; write the keys out")
            elif key in first_lines:
                self._report((*path, key), line, f"repeats the key of line {first_lines[key]}")
            else:
                first_lines[key] = line
                yield key, self.build(value_node, line, (*path, key))

    def _report(self, path: KeyPath, line: int, message: str) -> None:
        self.problems.append(Problem(path, message, Node(None, line, self.flag)))


def _syntax_error(error: MarkedYAMLError, name: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or "not valid YAML"
    where = name if mark is None else f"{name}:{mark.line + 1}"
    column = "" if mark is None else f" at column {mark.column + 1}"
    if "'\\t'" in problem:
        return ConfigError(
            f"{where}: tab at line {mark.line + 1} column {mark.column + 1}; use spaces",
            why="YAML does not allow tabs between a key and its value or as indentation",
            do="replace the tab by spaces",
        )
    return ConfigError(f"{where}: {problem}{column}", why=error.context or "", do=_hint(problem, error.context or ""))


def _hint(problem: str, context: str) -> str:
    if "escape character" in problem:
        return "use single quotes, in which \\ is an ordinary character: '\\d+'"
    if "cannot start any token" in problem or "block scalar" in context:
        return "quote the value"
    if "mapping values are not allowed" in problem:
        return "check the indentation, and quote a value that contains `: `"
    if "another document" in problem:
        return "keep one document: remove the line with ---"
    if "quoted scalar" in context:
        return "close the quote"
    return "check the indentation and the quotes of this line and the one above"
