import errno
from pathlib import Path

import pytest
import torch

from axolotl.core.run.faults import named_faults
from axolotl.errors import EnvironmentFault, MemoryFault, ServerError, StorageError
from tests.support.checkpoints import saved, truncate


def test_a_fault_says_which_checkpoint_is_kept(tmp_path: Path) -> None:
    _, newest, cut_short = saved(tmp_path, 3, 12, 13)
    truncate(cut_short / "optimizer.pt")
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


@pytest.mark.parametrize(
    ("module", "base", "code", "way_out"),
    [
        ("wandb.errors.errors", Exception, "E-ENV-11", "wandb login"),
        ("huggingface_hub.errors", OSError, "E-ENV-12", "hub_model_id"),
    ],
)
def test_a_service_that_refuses_is_the_users_to_settle(
    tmp_path: Path, module: str, base: type[Exception], code: str, way_out: str
) -> None:
    (newest,) = saved(tmp_path, 3)
    general = type("Error", (base,), {"__module__": module})
    # A library may define the errors of one of its parts elsewhere.
    special = type("SpecialError", (general,), {"__module__": "elsewhere"})
    with pytest.raises(EnvironmentFault) as problem, named_faults(tmp_path):
        raise special("403 for me/x\nand more")
    error = problem.value
    assert (error.exit_code, error.code, error.why) == (3, code, "403 for me/x")
    assert way_out in error.do and str(newest) in error.saved


def test_the_libraries_still_define_their_errors_there(tmp_path: Path) -> None:
    from huggingface_hub.errors import LocalTokenNotFoundError

    with pytest.raises(EnvironmentFault, match="the hub"), named_faults(tmp_path):
        raise LocalTokenNotFoundError()
    wandb = pytest.importorskip("wandb", reason="pip install axolotl[wandb]")
    for error in (wandb.errors.UsageError("bad project"), wandb.errors.CommError("no answer")):
        with pytest.raises(EnvironmentFault, match="Weights & Biases"), named_faults(tmp_path):
            raise error
