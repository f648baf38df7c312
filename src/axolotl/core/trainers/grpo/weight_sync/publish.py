"""A version's directory: written beside its place, made durable, given a manifest and renamed, so that a reader sees
all of it or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from axolotl.errors import StorageError
from axolotl.failpoints import point
from axolotl.serving.manifest import Kind, write_manifest


def publish(root: Path, version: int, write: Callable[[Path], None], *, kind: Kind, rank: int = 0) -> str:
    """Publish `root/v<version>` with the files that `write` puts into the directory it is given.

    Returns:
        The digest of the manifest, which the server is told.

    Raises:
        StorageError: `E-STO-02` the directory cannot be written.
    """
    staged, final = root / f".tmp-v{version}", root / f"v{version}"
    try:
        point("sync.before_save")
        for leftover in (staged, final):
            shutil.rmtree(leftover, ignore_errors=True)
        root.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask: a server reads no others' places
        staged.mkdir()
        write(staged)
        point("sync.after_files")
        digest = write_manifest(staged, version=version, rank=rank, kind=kind)
        point("sync.before_rename")
        staged.rename(final)
        point("sync.after_rename")
    except OSError as error:
        what = "adapter" if kind == "adapter" else "weights"
        raise StorageError(
            f"{what} version {version} could not be written",
            code="E-STO-02",
            why=f"{error.strerror or error} in the server's sync directory",
            do="free space there, or set vllm.sync_dir to another place that trainer and server share",
        ) from error
    return digest


def remove_others(root: Path, kept: Iterable[int]) -> None:
    """Remove published versions that are not in `kept`."""
    names = {f"v{version}" for version in kept}
    for directory in root.glob("v*"):
        if directory.name not in names and directory.name[1:].isdigit():
            shutil.rmtree(directory, ignore_errors=True)
