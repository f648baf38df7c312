"""The pages for people and what can be taken out of them: links, code blocks, names in backticks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced code block. place: `docs/grpo.qmd:41`, where its text begins."""

    place: str
    language: str
    text: str


def pages() -> list[Path]:
    found = sorted(ROOT.glob("*.md"))
    found += sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".qmd"))
    found += sorted((ROOT / "examples").glob("*/*.md"))  # not deeper: runs leave model cards in their output
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(*languages: str) -> list[Block]:
    """Every fenced block in one of the languages, in all pages."""
    found = []
    for page in pages():
        text = page.read_text()
        for match in _FENCE.finditer(text):
            if match[1] in languages:
                line = text.count("\n", 0, match.start(2)) + 1
                found.append(Block(f"{name(page)}:{line}", match[1], match[2]))
    return found


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    return [first or second for first, second in _LINK.findall(prose(page))]


def anchors(page: Path) -> set[str]:
    """What `#...` may point at: headings the way Pandoc and GitHub make identifiers of them."""
    return {slug(heading) for heading in _HEADING.findall(prose(page))}


def slug(heading: str) -> str:
    kept = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower())
    return re.sub(r"\s+", "-", kept.strip())


def code_words(page: Path) -> list[str]:
    """What stands in single backticks outside code blocks."""
    return _CODE.findall(prose(page))
