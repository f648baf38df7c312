import pytest
import torch

from axolotl.core.trainers.grpo.memory import Logits, MemoryGuard, is_out_of_memory
from axolotl.errors import MemoryFault

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ERROR, True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("not enough memory of what was said"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("DefaultCPUAllocator: not enough memory"), False),
    ],
)
def test_what_out_of_memory_looks_like(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_what_the_allocator_of_this_machine_says() -> None:
    with pytest.raises(RuntimeError) as problem:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(problem.value)


def test_the_logits_are_named_with_their_size() -> None:
    # 4 * 4 * 513 * 151936 bytes.
    assert str(Logits(4, 513, 151936, is_whole=True)) == "logits [4, 513, 151936] = 1.25 GB in float32"
    assert str(Logits(1, 2, 100, is_whole=False)) == "logits [1, 2, 100] = 800 B in float32 (computed in pieces)"


def test_once_with_half_and_then_an_error() -> None:
    said: list[str] = []
    guard = MemoryGuard(warn=said.append)
    assert guard.half(3, Logits(5, 9, 100, is_whole=True), ERROR) == 2
    assert len(said) == 1 and "step 3 with 5 completions at once" in said[0] and "with 2:" in said[0]
    with pytest.raises(MemoryFault, match="step 8 with 2 completions at once, for the second time") as problem:
        guard.half(8, Logits(2, 9, 100, is_whole=True), ERROR)
    fault = problem.value
    assert fault.__cause__ is ERROR and len(said) == 1
    assert fault.why == "logits [2, 9, 100] = 7.2 kB in float32; CUDA out of memory. Tried to allocate 2.00 GiB."
    assert fault.do.startswith("lower micro_batch_size to 1 ")


def test_one_completion_cannot_be_halved() -> None:
    with pytest.raises(MemoryFault) as problem:
        MemoryGuard().half(1, Logits(1, 9, 100, is_whole=True), ERROR)
    assert problem.value.do == "lower trl.max_completion_length"


def test_one_process_among_several_cannot_go_back_alone() -> None:
    with pytest.raises(MemoryFault, match="one process among several") as problem:
        MemoryGuard(num_processes=2).half(1, Logits(8, 9, 100, is_whole=True), ERROR)
    assert "micro_batch_size to 4 " in problem.value.do
