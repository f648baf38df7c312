import errno
from pathlib import Path

import pytest
import torch

from axolotl.core.run.faults import named_faults
from axolotl.errors import MemoryFault, ServerError, StorageError


def checkpoint(directory: Path, step: int) -> Path:
    (directory / f"checkpoint-{step}").mkdir(parents=True)
    return directory / f"checkpoint-{step}"


def test_a_fault_says_which_checkpoint_is_kept(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    newest = checkpoint(tmp_path, 12)
    with pytest.raises(ServerError) as problem, named_faults(tmp_path):
        raise ServerError("lost")
    assert problem.value.saved == f"{newest}, resumable with --resume"


def test_without_a_checkpoint_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ServerError) as problem, named_faults(tmp_path):
        raise ServerError("lost")
    assert problem.value.saved.startswith("nothing")


def test_out_of_memory_has_its_own_exit_code(tmp_path: Path) -> None:
    with pytest.raises(MemoryFault, match="out of memory") as problem, named_faults(tmp_path):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert problem.value.exit_code == 10 and "micro_batch_size" in problem.value.do


def test_a_full_disk_has_its_own_exit_code_and_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as problem, named_faults(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert problem.value.exit_code == 9
    with pytest.raises(StorageError), named_faults(tmp_path):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    with pytest.raises(RuntimeError, match="something else"), named_faults(tmp_path):
        raise RuntimeError("something else")
    with pytest.raises(FileNotFoundError), named_faults(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "no such file")
