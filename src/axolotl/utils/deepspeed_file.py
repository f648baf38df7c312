"""Where a DeepSpeed settings file of the config is found; those of the project are shipped with it."""

from __future__ import annotations

from pathlib import Path

import axolotl
from axolotl.errors import ConfigError

FOLDER = "deepspeed_configs"


def find_deepspeed_file(name: str, base_dir: Path) -> Path:
    """The file that `deepspeed: name` means: tried in the working directory, beside the config, among those shipped.

    Args:
        base_dir: the config's directory.

    Raises:
        ConfigError: it is nowhere, with the places that were tried.
    """
    given = Path(name).expanduser()
    if given.is_absolute():
        places = [given]
    else:
        places = list(dict.fromkeys([Path.cwd() / given, base_dir.resolve() / given, *(r / given for r in _shipped())]))
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(
        f"deepspeed: there is no file {name}",
        why="looked for " + ", ".join(str(place) for place in places),
        do=f"give the path of a JSON file, or one of those shipped: {', '.join(shipped_files())}",
    )


def shipped_files() -> list[str]:
    """Names that work from anywhere, such as `deepspeed_configs/zero3.json`."""
    return sorted({f"{FOLDER}/{file.name}" for root in _shipped() for file in (root / FOLDER).glob("*.json")})


def _shipped() -> list[Path]:
    """The installed package, and the repository of an editable install."""
    package = Path(axolotl.__file__).parent
    return [package, package.parents[1]]
