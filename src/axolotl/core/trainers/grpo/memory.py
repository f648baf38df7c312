"""When the memory does not hold a micro-batch: once in a run with half of it, then an error that says what to lower."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from axolotl.errors import MemoryFault

_CPU_ALLOCATOR = ("not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device, or of the machine: a CPU's allocator has no exception of its own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    is_cpu = "DefaultCPUAllocator" in text and any(words in text for words in _CPU_ALLOCATOR)
    return is_cpu or "CUBLAS_STATUS_ALLOC_FAILED" in text


@dataclass(frozen=True)
class Logits:
    """Those of a micro-batch, `[rows, width, vocabulary]` in float32: what grows with everything a user can lower.

    is_whole: whether they are held at once.
    """

    rows: int
    width: int
    vocabulary: int
    is_whole: bool

    def __str__(self) -> str:
        size = f"logits [{self.rows}, {self.width}, {self.vocabulary}] = {_bytes(self.num_bytes)} in float32"
        return size if self.is_whole else f"{size} (computed in pieces)"

    @property
    def num_bytes(self) -> int:
        return 4 * self.rows * self.width * self.vocabulary


class MemoryGuard:
    """Halves the micro-batch, once. Main thread. num_processes: of the training."""

    def __init__(self, num_processes: int = 1, warn: Callable[[str], None] | None = None) -> None:
        self._num_processes = num_processes
        self._warn = warn or _to_stderr
        self._is_halved = False

    def half(self, step: int, logits: Logits, error: BaseException) -> int:
        """How many completions to run at once instead of `logits.rows`, in step `step` (from 1) and from there on.

        Raises:
            MemoryFault: it was halved before, or cannot be: of one completion, or while other processes go on.
        """
        rows = logits.rows
        if self._is_halved or rows == 1 or self._num_processes > 1:
            raise MemoryFault(
                f"out of memory in step {step} with {_completions(rows)} at once{self._circumstance(rows)}",
                why=f"{logits}; {_first_line(error)}",
                do=_way_out(rows),
            ) from error
        self._is_halved = True
        self._warn(
            f"warning: out of memory in step {step} with {_completions(rows)} at once; the step is repeated, and the "
            f"run goes on, with {rows // 2}: the gradients are the same, the steps take longer"
        )
        return rows // 2

    def _circumstance(self, rows: int) -> str:
        if self._is_halved:
            return ", for the second time: micro-batches were halved before"
        return "" if rows == 1 else "; one process among several cannot repeat a step"


def _way_out(rows: int) -> str:
    if rows == 1:
        return "lower trl.max_completion_length"
    return (
        f"lower micro_batch_size to {rows // 2} and raise gradient_accumulation_steps by as much, or lower "
        "trl.max_completion_length"
    )


def _completions(rows: int) -> str:
    return "1 completion" if rows == 1 else f"{rows} completions"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
