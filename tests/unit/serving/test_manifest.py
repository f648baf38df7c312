from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from axolotl.errors import InternalError, SyncError
from axolotl.serving.manifest import FileEntry, Kind, verify_manifest, write_manifest


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "v3"
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes(b"{}")
    (directory / "adapter_model.safetensors").write_bytes(b"tensors")
    return directory


def test_what_was_written_verifies(adapter: Path) -> None:
    digest = write_manifest(adapter, version=3, rank=16)
    assert digest == hashlib.sha256((adapter / "manifest.json").read_bytes()).hexdigest()
    manifest = verify_manifest(adapter, digest)
    assert (manifest.version, manifest.rank) == (3, 16)
    assert manifest.files["adapter_config.json"] == FileEntry(2, hashlib.sha256(b"{}").hexdigest())


def test_other_files_are_not_published(adapter: Path) -> None:
    (adapter / "README.md").write_text("a model card")
    with pytest.raises(InternalError, match=r"README\.md"):
        write_manifest(adapter, version=3, rank=16)


def same_size(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"tensorz")


def truncated(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"tens")


def missing(adapter: Path) -> None:
    (adapter / "adapter_config.json").unlink()


def pickled_beside(adapter: Path) -> None:
    (adapter / "adapter_model.bin").write_bytes(b"")


def linked_file(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter.parent / "elsewhere")
    (adapter / "adapter_model.safetensors").symlink_to(adapter.parent / "elsewhere")


def linked_directory(adapter: Path) -> None:
    adapter.rename(adapter.parent / "elsewhere")
    adapter.symlink_to(adapter.parent / "elsewhere")


def other_manifest(adapter: Path) -> None:
    (adapter / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    "tamper",
    [same_size, truncated, missing, pickled_beside, linked_file, linked_directory, other_manifest],
)
def test_any_change_is_noticed(adapter: Path, tamper: Callable[[Path], None]) -> None:
    digest = write_manifest(adapter, version=3, rank=16)
    tamper(adapter)
    with pytest.raises(SyncError) as problem:
        verify_manifest(adapter, digest)
    assert problem.value.code == "E-SYN-02"
    assert str(adapter) not in str(problem.value.report())


@pytest.mark.parametrize("body", [{"version": 3}, {"version": 3, "rank": 1, "files": {"../x": {}}}, []])
def test_a_malformed_manifest_with_the_right_digest_is_refused(adapter: Path, body: object) -> None:
    text = json.dumps(body).encode()
    (adapter / "manifest.json").write_bytes(text)
    with pytest.raises(SyncError, match="does not match"):
        verify_manifest(adapter, hashlib.sha256(text).hexdigest())


def test_a_manifest_of_other_files_is_refused(adapter: Path) -> None:
    entry = {"size": 7, "sha256": hashlib.sha256(b"tensors").hexdigest()}
    text = json.dumps({"version": 3, "rank": 1, "files": {"../adapter_model.safetensors": entry}}).encode()
    (adapter / "manifest.json").write_bytes(text)
    with pytest.raises(SyncError, match="does not match"):
        verify_manifest(adapter, hashlib.sha256(text).hexdigest())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SyncError) as problem:
        verify_manifest(tmp_path / "v9", "0" * 64)
    assert problem.value.code == "E-SYN-06" and "v9" not in str(problem.value.report())


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    directory = tmp_path / "v4"
    directory.mkdir()
    for part in (1, 2):
        (directory / f"model-0000{part}-of-00002.safetensors").write_bytes(b"tensors %d" % part)
    return directory


def test_full_weights_are_any_number_of_files(weights: Path) -> None:
    digest = write_manifest(weights, version=4, kind="weights")
    manifest = verify_manifest(weights, digest, kind="weights")
    assert (manifest.version, manifest.rank, len(manifest.files)) == (4, 0, 2)
    with pytest.raises(SyncError, match="does not match"):
        verify_manifest(weights, digest)


def test_an_adapter_is_not_taken_for_full_weights(adapter: Path) -> None:
    digest = write_manifest(adapter, version=3, rank=16)
    with pytest.raises(SyncError, match="does not match"):
        verify_manifest(adapter, digest, kind="weights")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors.pkl", "config.json", ".hidden.safetensors"])
def test_full_weights_are_safetensors_only(weights: Path, name: str) -> None:
    (weights / name).write_bytes(b"")
    with pytest.raises(InternalError, match=name):
        write_manifest(weights, version=4, kind="weights")


def test_full_weights_are_not_nothing(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="one or more"):
        write_manifest(tmp_path, version=4, kind="weights")


@pytest.mark.parametrize(("kind", "rank"), [("adapter", 0), ("weights", 8)])
def test_the_rank_says_which_kind_it_is(adapter: Path, weights: Path, kind: Kind, rank: int) -> None:
    directory = adapter if kind == "adapter" else weights
    digest = write_manifest(directory, version=3, rank=rank, kind=kind)
    with pytest.raises(SyncError) as problem:
        verify_manifest(directory, digest, kind=kind)
    assert f"has rank {rank}" in problem.value.why
