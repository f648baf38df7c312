"""Write the parts of docs/ that come from the code. `make docs` runs it; a test fails when the files are behind.

A generated part stands between `<!-- BEGIN name -->` and `<!-- END name -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from axolotl.cli.config_schema import markdown
from axolotl.utils.schemas import availability

CONFIGURATION = Path(__file__).resolve().parents[1] / "docs" / "configuration.qmd"


def options() -> str:
    """What `axolotl config-schema --markdown` prints."""
    return markdown()


def not_available() -> str:
    """The options of which some values are refused for now."""
    return _table(availability.TRAINING)


def several_processes() -> str:
    """Those that are refused where several processes train together."""
    return _table(availability.SEVERAL_RANKS)


def _table(rows: Sequence[availability.Row]) -> str:
    return "\n".join(["| Option | For now |", "|---|---|", *(f"| `{row.key}` | {row.instead} |" for row in rows)])


PARTS: dict[str, Callable[[], str]] = {
    "options": options,
    "not available": not_available,
    "several processes": several_processes,
}


def render(text: str) -> str:
    """`text` with every generated part made anew. A part without markers is an error."""
    for name, make in PARTS.items():
        begin, end = f"<!-- BEGIN {name} -->", f"<!-- END {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"{CONFIGURATION.name} needs exactly one pair of {begin} and {end}")
        before, after = pattern.split(text)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


if __name__ == "__main__":
    CONFIGURATION.write_text(render(CONFIGURATION.read_text()))
    print(CONFIGURATION)
