from __future__ import annotations

import os
from pathlib import Path

from axolotl.core.trainers.grpo.weight_sync.publish import publish
from axolotl.serving.manifest import verify_manifest


def write_adapter(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"tensors")


def test_the_server_reads_what_is_published_without_a_umask(tmp_path: Path) -> None:
    """Many containers have none; the server refuses what every user could have written."""
    previous = os.umask(0)
    try:
        digest = publish(tmp_path / "adapters" / "run-1", 1, write_adapter, kind="adapter", rank=2)
    finally:
        os.umask(previous)
    assert verify_manifest(tmp_path / "adapters" / "run-1" / "v1", digest).version == 1


def test_what_was_left_of_the_same_version_is_replaced(tmp_path: Path) -> None:
    for leftover in (".tmp-v1", "v1"):
        (tmp_path / "run-1" / leftover).mkdir(parents=True)
        (tmp_path / "run-1" / leftover / "adapter_model.bin").touch()
    digest = publish(tmp_path / "run-1", 1, write_adapter, kind="adapter", rank=2)
    assert verify_manifest(tmp_path / "run-1" / "v1", digest).version == 1
    assert [path.name for path in (tmp_path / "run-1").iterdir()] == ["v1"]
