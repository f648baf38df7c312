"""`manifest.json`: what a checkpoint consists of, written last, so that a checkpoint that has one was complete.

    {"format": 1, "step": 40, "files": {"optimizer.pt": {"bytes": 5210, "sha256": "..."}, ...}, "sha256": "..."}

The last digest is that of the manifest without it: a byte that flips in the manifest shows as well. Files that are not
listed are somebody else's and are left out of account.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class Problem:
    """One file that is not what was saved. file: relative to the checkpoint."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


class ManifestError(ValueError):
    """The manifest itself is damaged, or of another format; the text says how."""


def seal(directory: Path, step: int) -> None:
    """Make everything below `directory` durable and write the manifest. `OSError` where the disk does not take it."""
    files = {}
    for name in _files(directory):
        path = directory / name
        _sync(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    body = {"format": _FORMAT, "step": step, "files": files}
    with (directory / MANIFEST).open("wb", buffering=0) as file:
        text = _text(body)
        if file.write(text) != len(text):
            raise OSError(f"{MANIFEST} was written in part")
        os.fsync(file.fileno())
    for folder in (*(item for item in directory.rglob("*") if item.is_dir()), directory):
        _sync(folder)


def verify(directory: Path, *, contents: bool = True) -> list[Problem]:
    """What is wrong with a checkpoint; empty when it is exactly what was saved.

    Args:
        contents: read every byte; False looks at names and sizes only.
    """
    try:
        entries = read_manifest(directory)
    except FileNotFoundError:
        return [Problem(MANIFEST, "is missing")]
    except ManifestError as error:
        return [Problem(MANIFEST, str(error))]
    except OSError as error:
        return [Problem(MANIFEST, f"cannot be read ({error.strerror or error})")]
    found = (_problem(directory, name, entry, contents) for name, entry in entries.items())
    return [problem for problem in found if problem is not None]


def read_manifest(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """Size and digest of every file, by name. Raises `FileNotFoundError`, `ManifestError` or another `OSError`."""
    raw = (directory / MANIFEST).read_bytes()
    try:
        body = json.loads(raw)
        body.pop("sha256")
        is_as_written = _text(body) == raw
    except (ValueError, KeyError, AttributeError, TypeError):
        is_as_written = False
    if not is_as_written:
        raise ManifestError("is damaged")
    if body.get("format") != _FORMAT:
        raise ManifestError("was written by another version of axolotl")
    if not all(_is_inside(name) for name in body["files"]):
        raise ManifestError("names files outside of the checkpoint")
    entries: Mapping[str, Mapping[str, Any]] = body["files"]
    return entries


def sync_directory(directory: Path) -> None:
    """Make names durable: a rename is on the disk only after this."""
    _sync(directory)


def _problem(directory: Path, name: str, entry: Mapping[str, Any], contents: bool) -> Problem | None:
    path = directory / name
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return Problem(name, f"has {size} bytes instead of {entry['bytes']}")
        if contents and _sha256(path) != entry["sha256"]:
            return Problem(name, "has other contents than were saved")
    except FileNotFoundError:
        return Problem(name, "is missing")
    except OSError as error:
        return Problem(name, f"cannot be read ({error.strerror or error})")
    return None


def _files(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path != directory / MANIFEST:
            yield path.relative_to(directory).as_posix()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _text(body: Mapping[str, Any]) -> bytes:
    plain = json.dumps(body, indent=1, sort_keys=True)
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
