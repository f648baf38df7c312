"""The manifest of a published directory: what was written is what gets loaded.

    {"version": 3, "rank": 16, "files": {"adapter_model.safetensors": {"size": 123, "sha256": "..."}, ...}}

The trainer writes it last, before the rename that publishes the directory, and sends its digest. The server checks the
digest, then every file, and accepts no file beside them. An adapter is two files; full weights are one or more
`*.safetensors`, with rank 0.

The engines read the files by path after they were hashed, in other processes even. `check_unchanged`, called when the
engine has loaded them, closes that gap: identity, size and change time of every file and of the directory must still be
those of the hash. A private copy would close it too, at the price of writing every version twice; nothing but a process
with our own user id can get past the change time, and that one could change our memory as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from axolotl.errors import InternalError, SyncError
from axolotl.failpoints import point

Kind = Literal["adapter", "weights"]

MANIFEST_NAME = "manifest.json"
ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})
MAX_JSON_BYTES = 65_536
MAX_ADAPTER_BYTES = 4 << 30
MAX_MANIFEST_BYTES: dict[Kind, int] = {"adapter": MAX_JSON_BYTES, "weights": 1 << 20}
MAX_HEADER_BYTES: dict[Kind, int] = {"adapter": 1 << 20, "weights": 16 << 20}
"""Of a safetensors file: the part that is parsed. An entry takes about 150 bytes, a large model has 100,000 tensors."""
_WEIGHTS_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\.safetensors")
_CHUNK = 1 << 20
_NOT_OURS = (
    "see that trainer and server see the same vllm.sync_dir and that nothing else writes to it, "
    "then rerun train with --resume"
)


@dataclass(frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Stamp:
    """What changes with a file or directory when somebody writes to it or puts another in its place."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class Manifest:
    """version and rank of the adapter (0 for full weights); size in bytes and hex digest of every file but the
    manifest itself. stamps: of every file by name, and of the directory as `.`, when it was verified."""

    version: int
    rank: int
    files: dict[str, FileEntry]
    stamps: dict[str, Stamp]


class _FileBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _ManifestBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int = Field(ge=1)
    rank: int = Field(ge=0)
    files: dict[str, _FileBody]


def write_manifest(directory: Path, *, version: int, rank: int = 0, kind: Kind = "adapter") -> str:
    """Write `manifest.json` for the files in `directory`, and fsync the files and the directory.

    Whatever the umask (containers often have none), other users cannot write to them afterwards.

    Args:
        rank: of the adapter; 0 for full weights.

    Returns:
        The hex sha256 of the manifest, which goes into the request that loads the version.

    Raises:
        InternalError: the directory holds anything but the files of its kind.
    """
    names = {path.name for path in directory.iterdir()}
    if not _is_complete(kind, names):
        raise InternalError(f"{_holds(kind)}, found {sorted(names)}")
    files = {}
    for name in sorted(names):
        path = directory / name
        _seal(path)
        with path.open("rb") as file:
            files[name] = {"size": path.stat().st_size, "sha256": _sha256(file.fileno())}
    text = json.dumps({"version": version, "rank": rank, "files": files}, sort_keys=True).encode()
    path = directory / MANIFEST_NAME
    point("sync.before_manifest")
    path.write_bytes(text)
    _seal(path)
    _seal(directory)
    return hashlib.sha256(text).hexdigest()


def verify_manifest(directory: Path, sha256: str, *, kind: Kind = "adapter") -> Manifest:
    """Check that `directory` holds exactly what its manifest says, and that the manifest is the one announced.

    `directory` is `.../<run>/v<version>`. None of run, version and files may be a link; all must belong to this user or
    root, and must not be writable for everybody.

    Raises:
        SyncError: `E-SYN-06` the directory cannot be read or is not safe to read, `E-SYN-02` anything in it is not as
            announced. The texts name files, never the directory.
    """
    try:
        with (
            _opened(directory.parent, os.O_DIRECTORY, "the run's directory") as (parent, _),
            _opened(directory.name, os.O_DIRECTORY, "the directory", parent) as (descriptor, stamp),
        ):
            return _verify(descriptor, stamp, sha256, kind)
    except OSError as error:
        raise SyncError(
            f"the server cannot read the version ({error.strerror or type(error).__name__})",
            code="E-SYN-06",
            why="the directory does not exist for the server, or it has no permission to read it",
            do="give trainer and server the same vllm.sync_dir, on a file system both can read",
        ) from error


def check_unchanged(directory: Path, manifest: Manifest) -> None:
    """Raise `E-SYN-02` when anything in `directory` was written to or replaced since it was verified."""
    for name, stamp in manifest.stamps.items():
        try:
            now = Stamp.of(os.lstat(directory / name))
        except OSError:
            now = None
        if now != stamp:
            what = "the directory" if name == "." else name
            raise _mismatch(f"{what} was changed while the version was loaded")


def _verify(directory: int, directory_stamp: Stamp, sha256: str, kind: Kind) -> Manifest:
    names = set(os.listdir(directory))
    if MANIFEST_NAME not in names or not _is_complete(kind, names - {MANIFEST_NAME}):
        raise _mismatch(f"files are {_listed(names)}; {_holds(kind)} and {MANIFEST_NAME}")
    stamps = {".": directory_stamp}
    with _opened(MANIFEST_NAME, 0, MANIFEST_NAME, directory) as (descriptor, stamps[MANIFEST_NAME]):
        text = _read_small(descriptor, MANIFEST_NAME, MAX_MANIFEST_BYTES[kind])
    if hashlib.sha256(text).hexdigest() != sha256:
        raise _mismatch("manifest.json is not the one the trainer announced")
    body = _parse(text, kind, names - {MANIFEST_NAME})
    for name, entry in body.files.items():
        with _opened(name, 0, name, directory) as (descriptor, stamps[name]):
            _check_form(name, descriptor, stamps[name].size, kind)
            if stamps[name].size != entry.size or _sha256(descriptor) != entry.sha256:
                raise _mismatch(f"{name} differs from its entry in the manifest")
    files = {name: FileEntry(entry.size, entry.sha256) for name, entry in body.files.items()}
    return Manifest(body.version, body.rank, files, stamps)


def _parse(text: bytes, kind: Kind, names: set[str]) -> _ManifestBody:
    try:
        body = _ManifestBody.model_validate_json(text)
    except ValidationError as error:
        raise _mismatch(f"manifest.json is malformed ({error.error_count()} problems)") from error
    if set(body.files) != names:
        raise _mismatch(f"manifest.json lists {_listed(set(body.files))}")
    if (body.rank == 0) != (kind == "weights"):
        raise _mismatch(f"manifest.json has rank {body.rank}; an adapter has at least 1, full weights have 0")
    if kind == "adapter" and sum(entry.size for entry in body.files.values()) > MAX_ADAPTER_BYTES:
        raise _mismatch(f"the adapter is larger than {MAX_ADAPTER_BYTES} bytes")
    return body


def _check_form(name: str, descriptor: int, size: int, kind: Kind) -> None:
    """Bound what a parser would hold. That a file is valid at all is for its reader to find out."""
    if name.endswith(".json"):
        if size > MAX_JSON_BYTES:
            raise _mismatch(f"{name}: {size} bytes, at most {MAX_JSON_BYTES}")
        return
    start = os.pread(descriptor, 8, 0)
    header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if MAX_HEADER_BYTES[kind] < header <= size:
        raise _mismatch(f"{name}: a header of {header} bytes, at most {MAX_HEADER_BYTES[kind]}")


@contextmanager
def _opened(path: Path | str, flags: int, shown: str, directory: int | None = None) -> Iterator[tuple[int, Stamp]]:
    """An open file or directory that is safe to read, and its stamp. A link or a pipe is refused, not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=directory)
    except OSError as error:
        if os.path.islink(path) if directory is None else _is_link(path, directory):
            raise _mismatch(f"{shown} is a link") from error
        raise
    try:
        status = os.fstat(descriptor)
        _check_safe(status, shown, is_directory=bool(flags & os.O_DIRECTORY))
        yield descriptor, Stamp.of(status)
    finally:
        os.close(descriptor)


def _is_link(name: Path | str, directory: int) -> bool:
    return stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode)


def _check_safe(status: os.stat_result, shown: str, *, is_directory: bool) -> None:
    if not is_directory and not stat.S_ISREG(status.st_mode):
        raise _mismatch(f"{shown} is not a regular file")
    if status.st_uid not in (os.getuid(), 0):
        raise _unsafe(f"{shown} belongs to user id {status.st_uid}, the server runs as {os.getuid()}")
    if status.st_mode & stat.S_IWOTH and not (is_directory and status.st_mode & stat.S_ISVTX):
        raise _unsafe(f"{shown} can be written to by every user (mode {stat.S_IMODE(status.st_mode):o})")


def _is_complete(kind: Kind, names: set[str]) -> bool:
    if kind == "adapter":
        return names == ADAPTER_FILES
    return bool(names) and all(_WEIGHTS_FILE.fullmatch(name) for name in names)


def _holds(kind: Kind) -> str:
    if kind == "adapter":
        return f"an adapter directory must hold {sorted(ADAPTER_FILES)}"
    return "a weights directory must hold one or more .safetensors files"


def _listed(names: set[str]) -> str:
    """At most eight of them: they came from outside, and the text goes into an answer."""
    shown = [name[:64] for name in sorted(names)[:8]]
    return f"{shown}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _mismatch(why: str) -> SyncError:
    return SyncError("the version does not match its manifest", code="E-SYN-02", why=why, do=_NOT_OURS)


def _unsafe(why: str) -> SyncError:
    return SyncError(
        "the server does not read what others could have written",
        code="E-SYN-06",
        why=why,
        do="run trainer and server as the same user, with a umask that keeps other users from writing",
    )


def _read_small(descriptor: int, name: str, limit: int) -> bytes:
    text = os.pread(descriptor, limit + 1, 0)
    if len(text) > limit:
        raise _mismatch(f"{name}: more than {limit} bytes")
    return text


def _sha256(descriptor: int) -> str:
    digest, position = hashlib.sha256(), 0
    while chunk := os.pread(descriptor, _CHUNK, position):
        digest.update(chunk)
        position += len(chunk)
    return digest.hexdigest()


def _seal(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & stat.S_IWOTH:
            os.fchmod(descriptor, mode & ~stat.S_IWOTH)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
