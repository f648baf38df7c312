"""Faults that libraries raise under names of their own, given ours, and what of the run is kept on disk."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.trainer_utils import get_last_checkpoint

from axolotl.errors import AxolotlError, Interrupted, MemoryFault, StorageError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def named_faults(output_dir: Path) -> Iterator[None]:
    """Out of memory and a full disk become `MemoryFault` and `StorageError`; every fault says what is kept.

    output_dir: where checkpoints are looked for.
    """
    try:
        yield
    except AxolotlError as error:
        if not isinstance(error, Interrupted):
            error.saved = error.saved or kept(output_dir)
        raise
    except torch.OutOfMemoryError as error:
        raise MemoryFault(
            "out of memory while training",
            why=str(error).splitlines()[0],
            do="lower micro_batch_size (and raise gradient_accumulation_steps) or trl.max_completion_length",
            saved=kept(output_dir),
        ) from error
    except (OSError, RuntimeError) as error:
        if not _is_full_disk(error):
            raise
        raise StorageError(
            f"no space left for what the run writes in {output_dir}",
            why=str(error).splitlines()[0],
            do="free space or set save_total_limit, then rerun train with --resume",
            saved=kept(output_dir),
        ) from error


def _is_full_disk(error: OSError | RuntimeError) -> bool:
    """torch.save reports a write that failed as a RuntimeError of its zip writer."""
    if isinstance(error, OSError):
        return error.errno in _NO_SPACE
    return "PytorchStreamWriter failed" in str(error) or "unexpected pos" in str(error)


def kept(output_dir: Path) -> str:
    """The `saved` line of a report: the newest checkpoint, if there is one."""
    newest = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None  # type: ignore[no-untyped-call]
    return f"{newest}, resumable with --resume" if newest else "nothing: no checkpoint had been written"
