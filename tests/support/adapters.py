"""Published versions for server tests: adapters and full weights."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from axolotl.serving.manifest import write_manifest
from tests.support.tiny_model import make_random_adapter, make_tiny_model


def publish_fake(sync_dir: Path, run_id: str, version: int, *, rank: int = 8, weights: bytes | None = None) -> str:
    """Files that only the fake engine takes for an adapter; returns the manifest's digest."""
    directory = sync_dir / "adapters" / run_id / f"v{version}"
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights if weights is not None else b"weights %d" % version)
    return write_manifest(directory, version=version, rank=rank)


def publish_fake_weights(sync_dir: Path, run_id: str, version: int, *, weights: bytes | None = None) -> str:
    """Full weights that only the fake engine takes; returns the manifest's digest."""
    directory = sync_dir / "weights" / run_id / f"v{version}"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(weights if weights is not None else b"weights %d" % version)
    return write_manifest(directory, version=version, kind="weights")


def publish_random(
    sync_dir: Path, run_id: str, version: int, model: Path, *, rank: int = 8, seed: int | None = None
) -> str:
    """A random adapter of the model in `model`, different for each seed (the version, when None); returns the
    manifest's digest."""
    directory = sync_dir / "adapters" / run_id / f"v{version}"
    scratch = make_random_adapter(
        model, directory.parent / f".tmp-v{version}", rank=rank, seed=version if seed is None else seed
    )
    (scratch / "README.md").unlink(missing_ok=True)
    digest = write_manifest(scratch, version=version, rank=rank)
    shutil.move(scratch, directory)
    return digest


def publish_other_weights(sync_dir: Path, run_id: str, version: int, *, seed: int | None = None) -> str:
    """Full weights of another random tiny model for each seed (the version, when None); returns the manifest's
    digest."""
    other = make_tiny_model(sync_dir / f"model-{uuid.uuid4().hex}", seed=1000 + (version if seed is None else seed))
    directory = sync_dir / "weights" / run_id / f"v{version}"
    directory.mkdir(parents=True)
    shutil.move(other / "model.safetensors", directory)
    shutil.rmtree(other)
    return write_manifest(directory, version=version, kind="weights")
