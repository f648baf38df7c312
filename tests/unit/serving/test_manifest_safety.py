"""What a published directory may look like before the server reads it, and that what was hashed is what was loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from axolotl.errors import SyncError
from axolotl.serving.engines.lora import read_adapter
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.manifest import (
    MAX_ADAPTER_BYTES,
    MAX_HEADER_BYTES,
    MAX_JSON_BYTES,
    Kind,
    check_unchanged,
    verify_manifest,
    write_manifest,
)

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
NAME = "base_model.model.q_proj.lora_{}.weight"
TENSORS = {NAME.format("A"): torch.ones(2, 4), NAME.format("B"): torch.ones(4, 2)}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "run-1" / "v3"
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG))
    (directory / "adapter_model.safetensors").write_bytes(save(TENSORS))
    return directory


def refusal(directory: Path, digest: str, kind: Kind = "adapter") -> SyncError:
    with pytest.raises(SyncError) as problem:
        verify_manifest(directory, digest, kind=kind)
    assert str(directory.parent) not in str(problem.value.report())
    return problem.value


def linked_run(adapter: Path) -> None:
    adapter.parent.rename(adapter.parent.with_name("elsewhere"))
    adapter.parent.symlink_to(adapter.parent.with_name("elsewhere"))


def linked_manifest(adapter: Path) -> None:
    (adapter / "manifest.json").rename(adapter.parent / "manifest.json")
    (adapter / "manifest.json").symlink_to("../manifest.json")


def pipe(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.safetensors")


def directory_in_place_of_a_file(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").mkdir()


@pytest.mark.parametrize("tamper", [linked_run, linked_manifest, pipe, directory_in_place_of_a_file])
def test_links_and_special_files_are_refused_without_waiting(adapter: Path, tamper: Callable[[Path], None]) -> None:
    digest = write_manifest(adapter, version=3, rank=2)
    tamper(adapter)
    assert refusal(adapter, digest).code == "E-SYN-02"


@pytest.mark.parametrize("name", ["..", ".", "manifest.json", "adapter_config.json", "adapter_model.safetensors"])
def test_what_every_user_could_have_written_is_not_read(adapter: Path, name: str) -> None:
    digest = write_manifest(adapter, version=3, rank=2)
    path = adapter / name
    path.chmod(path.stat().st_mode | 0o002)
    problem = refusal(adapter, digest)
    assert problem.code == "E-SYN-06" and "by every user" in problem.why and "umask" in problem.do


def test_a_manifest_can_be_written_without_a_umask(adapter: Path) -> None:
    for path in (adapter, *adapter.iterdir()):
        path.chmod(0o777)
    previous = os.umask(0)
    try:
        digest = write_manifest(adapter, version=3, rank=2)
    finally:
        os.umask(previous)
    assert verify_manifest(adapter, digest).version == 3


def test_a_run_in_a_directory_like_tmp_is_read(adapter: Path) -> None:
    """Sticky: everybody may add a name, only its owner may rename one."""
    digest = write_manifest(adapter, version=3, rank=2)
    adapter.parent.chmod(0o1777)
    assert verify_manifest(adapter, digest).version == 3


def test_what_belongs_to_another_user_is_not_read(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = write_manifest(adapter, version=3, rank=2)
    if os.getuid() == 0:
        for path in (adapter, *adapter.iterdir()):
            os.chown(path, 4711, -1)
        owner, server = 4711, 0
    else:
        owner, server = os.getuid(), 4711
        monkeypatch.setattr("os.getuid", lambda: server)
    problem = refusal(adapter, digest)
    assert problem.code == "E-SYN-06"
    assert f"belongs to user id {owner}, the server runs as {server}" in problem.why


def written_in_place(adapter: Path) -> None:
    """Same bytes, same size, and the time set back: only the change time tells."""
    path = adapter / "adapter_model.safetensors"
    before = path.stat()
    path.write_bytes(save(TENSORS))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(adapter: Path) -> None:
    other = adapter.parent / "other"
    shutil.copy2(adapter / "adapter_config.json", other)
    other.replace(adapter / "adapter_config.json")


def directory_replaced(adapter: Path) -> None:
    shutil.copytree(adapter, adapter.parent / "copy")
    adapter.rename(adapter.parent / "old")
    (adapter.parent / "copy").rename(adapter)


def file_added(adapter: Path) -> None:
    (adapter / "adapter_model.bin").write_bytes(b"")


def removed(adapter: Path) -> None:
    shutil.rmtree(adapter)


@pytest.mark.parametrize("swap", [written_in_place, replaced, directory_replaced, file_added, removed])
def test_a_swap_between_hash_and_load_is_noticed(adapter: Path, swap: Callable[[Path], None]) -> None:
    manifest = verify_manifest(adapter, write_manifest(adapter, version=3, rank=2))
    check_unchanged(adapter, manifest)
    read_adapter(adapter)
    check_unchanged(adapter, manifest)
    swap(adapter)
    with pytest.raises(SyncError, match="does not match its manifest") as problem:
        check_unchanged(adapter, manifest)
    assert problem.value.code == "E-SYN-02" and "changed while" in problem.value.why


def sparse(path: Path, size: int, start: bytes = b"") -> None:
    path.write_bytes(start)
    os.truncate(path, size)


@pytest.mark.parametrize("kind", ["adapter", "weights"])
def test_a_header_that_would_fill_the_memory_is_not_parsed(tmp_path: Path, kind: Kind) -> None:
    directory = tmp_path / "v1"
    directory.mkdir()
    limit = MAX_HEADER_BYTES[kind]
    sparse(directory / "adapter_model.safetensors", limit + 100, struct.pack("<Q", limit + 1))
    if kind == "adapter":
        (directory / "adapter_config.json").write_text("{}")
    digest = write_manifest(directory, version=1, rank=int(kind == "adapter"), kind=kind)
    assert f"a header of {limit + 1} bytes, at most {limit}" in refusal(directory, digest, kind).why


def test_a_large_config_is_refused_by_size(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(" " * (MAX_JSON_BYTES + 1))
    problem = refusal(adapter, write_manifest(adapter, version=3, rank=2))
    assert problem.why == f"adapter_config.json: {MAX_JSON_BYTES + 1} bytes, at most {MAX_JSON_BYTES}"


def test_an_adapter_larger_than_the_limit_is_refused_before_it_is_read(adapter: Path) -> None:
    """The digest in the manifest is wrong, which reading 4 GB would have shown first."""
    write_manifest(adapter, version=3, rank=2)
    body = json.loads((adapter / "manifest.json").read_text())
    body["files"]["adapter_model.safetensors"]["size"] = MAX_ADAPTER_BYTES
    text = json.dumps(body).encode()
    (adapter / "manifest.json").write_bytes(text)
    sparse(adapter / "adapter_model.safetensors", MAX_ADAPTER_BYTES)
    assert "larger than" in refusal(adapter, hashlib.sha256(text).hexdigest()).why


def test_the_text_of_a_refusal_is_bounded(adapter: Path) -> None:
    digest = write_manifest(adapter, version=3, rank=2)
    for index in range(200):
        (adapter / f"{index:03}{'x' * 200}").touch()
    assert len(refusal(adapter, digest).why) < 1_000


def raw(header: dict[str, object], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def matrix(start: int, end: int, shape: tuple[int, int] = (2, 4)) -> dict[str, object]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}


BAD_FILES = {
    "overlapping": raw({NAME.format("A"): matrix(0, 32), NAME.format("B"): matrix(16, 48, (4, 2))}, b"\0" * 48),
    "offset 2^63": raw({NAME.format("A"): matrix(0, 2**63)}, b"\0" * 32),
    "offset 2^64 - 1": raw({NAME.format("A"): matrix(2**64 - 33, 2**64 - 1)}, b"\0" * 32),
    "negative offset": raw({NAME.format("A"): matrix(-32, 0)}, b"\0" * 32),
    "shape that overflows": raw({NAME.format("A"): matrix(0, 32, (2**62, 8))}, b"\0" * 32),
    "hole": raw({NAME.format("A"): matrix(0, 32), NAME.format("B"): matrix(64, 96, (4, 2))}, b"\0" * 96),
    "short": raw({NAME.format("A"): matrix(0, 32)}, b"\0" * 31),
    "header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "header 2^64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"\x80\x04K.",
    "deep JSON": struct.pack("<Q", 200_000) + b'{"a":' * 40_000,
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
    "a zip": b"PK\x03\x04" + b"\0" * 60,
    "empty": b"",
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_broken_tensor_file_is_a_refusal_whatever_its_digest(adapter: Path, case: str) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(BAD_FILES[case])
    verify_manifest(adapter, write_manifest(adapter, version=3, rank=2))
    with pytest.raises(EngineRejects, match="not a valid safetensors file"):
        read_adapter(adapter)
