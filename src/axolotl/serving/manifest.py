"""The manifest of a published adapter directory: what was written is what gets loaded.

    {"version": 3, "rank": 16, "files": {"adapter_model.safetensors": {"size": 123, "sha256": "..."}, ...}}

The trainer writes it last, before the rename that publishes the directory, and sends its digest. The server checks the
digest, then every file, and accepts no file beside them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from axolotl.errors import InternalError, SyncError

MANIFEST_NAME = "manifest.json"
ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})
MAX_JSON_BYTES = 65_536
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """version and rank of the adapter; size in bytes and hex digest of every file but the manifest itself."""

    version: int
    rank: int
    files: dict[str, FileEntry]


class _FileBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _ManifestBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int = Field(ge=1)
    rank: int = Field(ge=1)
    files: dict[str, _FileBody]


def write_manifest(directory: Path, *, version: int, rank: int) -> str:
    """Write `manifest.json` for the adapter files in `directory`, and fsync the files and the directory.

    Returns:
        The hex sha256 of the manifest, which goes into the request that loads the adapter.

    Raises:
        InternalError: the directory holds anything but the two adapter files.
    """
    names = {path.name for path in directory.iterdir()}
    if names != ADAPTER_FILES:
        raise InternalError(f"an adapter directory must hold {sorted(ADAPTER_FILES)}, found {sorted(names)}")
    files = {}
    for name in sorted(names):
        path = directory / name
        _fsync(path)
        files[name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    text = json.dumps({"version": version, "rank": rank, "files": files}, sort_keys=True).encode()
    path = directory / MANIFEST_NAME
    path.write_bytes(text)
    _fsync(path)
    _fsync(directory)
    return hashlib.sha256(text).hexdigest()


def verify_manifest(directory: Path, sha256: str) -> Manifest:
    """Check that `directory` holds exactly what its manifest says, and that the manifest is the one announced.

    Raises:
        SyncError: `E-SYN-06` the directory cannot be read, `E-SYN-02` anything in it is not as announced. The texts
            name files, never the directory.
    """
    try:
        return _verify(directory, sha256)
    except OSError as error:
        raise SyncError(
            f"the server cannot read the adapter ({error.strerror or type(error).__name__})",
            code="E-SYN-06",
            why="the directory does not exist for the server, or it has no permission to read it",
            do="give trainer and server the same vllm.sync_dir, on a file system both can read",
        ) from error


def _verify(directory: Path, sha256: str) -> Manifest:
    if not stat.S_ISDIR(os.lstat(directory).st_mode):
        raise _mismatch("the adapter is not a plain directory")
    names = {path.name for path in directory.iterdir()}
    if names != ADAPTER_FILES | {MANIFEST_NAME}:
        raise _mismatch(f"files are {sorted(names)}; exactly {sorted(ADAPTER_FILES | {MANIFEST_NAME})} are accepted")
    for name in sorted(names):
        if not stat.S_ISREG(os.lstat(directory / name).st_mode):
            raise _mismatch(f"{name} is not a regular file")
    for name in (MANIFEST_NAME, "adapter_config.json"):
        if (directory / name).stat().st_size > MAX_JSON_BYTES:
            raise _mismatch(f"{name} is larger than {MAX_JSON_BYTES} bytes")
    text = (directory / MANIFEST_NAME).read_bytes()
    if hashlib.sha256(text).hexdigest() != sha256:
        raise _mismatch("manifest.json is not the one the trainer announced")
    try:
        body = _ManifestBody.model_validate_json(text)
    except ValidationError as error:
        raise _mismatch(f"manifest.json is malformed ({error.error_count()} problems)") from error
    if set(body.files) != ADAPTER_FILES:
        raise _mismatch(f"manifest.json lists {sorted(body.files)}")
    for name, entry in body.files.items():
        path = directory / name
        if path.stat().st_size != entry.size or _sha256(path) != entry.sha256:
            raise _mismatch(f"{name} differs from its entry in the manifest")
    files = {name: FileEntry(entry.size, entry.sha256) for name, entry in body.files.items()}
    return Manifest(body.version, body.rank, files)


def _mismatch(why: str) -> SyncError:
    return SyncError("the adapter does not match its manifest", code="E-SYN-02", why=why, do="push it again")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
