"""The config as it was written: values that know their line, and problems that know their key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Key = str | int
Path = tuple[Key, ...]


@dataclass(frozen=True)
class Problem:
    """Something wrong with the option at `path`. `message` is the rest of the sentence that starts with the key.
    `node` says where that is when the path alone does not: the key was moved or left out. code: of a report that has
    problems of this kind only; None for the general one."""

    path: Path
    message: str
    node: Node | None = None
    code: str | None = None


@dataclass(frozen=True)
class Node:
    """One value of the YAML file or of the command line.

    value: None, `Plain` for an unquoted scalar, `str` for a quoted one, or a container of nodes.
    line: line of its key (1 is the first, 0 none). flag: the command line flag it came from, with its dashes.
    """

    value: Any
    line: int
    flag: str | None = None

    def plain(self) -> Any:
        """The value without its lines, for validation."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def find(self, path: Sequence[Key]) -> Node | None:
        """The node at `path`, or None."""
        node: Node | None = self
        for key in path:
            if node is None:
                return None
            if isinstance(node.value, dict):
                node = node.value.get(key)
            elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
                node = node.value[key]
            else:
                return None
        return node

    def nearest(self, path: Sequence[Key]) -> Node | None:
        """The deepest node on the way to `path`; None when not even its first key is there."""
        for length in range(len(path), 0, -1):
            if (node := self.find(path[:length])) is not None:
                return node
        return None

    def entries(self) -> Iterator[tuple[str, Node]]:
        """Entries of a mapping; nothing for anything else."""
        if isinstance(self.value, dict):
            yield from self.value.items()


def dotted(path: Iterable[Key]) -> str:
    """`("datasets", 0, "path")` as a user writes it: `datasets.0.path`."""
    return ".".join(str(key) for key in path)
