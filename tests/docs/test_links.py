"""Every link inside the repository leads somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, code_words, links, name, pages, slug


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in links(page):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix in (".md", ".qmd") and anchor not in anchors(file)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", pages(), ids=name)
def test_paths_in_backticks_exist(page: Path) -> None:
    """`src/...`, `docs/...` and the like name files of this repository."""
    folders = (
        "src/",
        "docs/",
        "tests/",
        "examples/",
        "scripts/",
        "deepspeed_configs/",
        "constraints/",
        "requirements/",
    )
    made = ("examples/quickstart/output", "examples/quickstart/model", "examples/quickstart/data")
    missing = [
        word
        for word in code_words(page)
        if word.startswith(folders) and not word.startswith(made) and " " not in word and not (ROOT / word).exists()
    ]
    assert not missing


def test_slug() -> None:
    assert slug("Not available yet") == "not-available-yet"
    assert slug("`trl:` and (more)") == "trl-and-more"
