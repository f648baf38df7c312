"""Faults that libraries raise under names of their own, given ours, and what of the run is kept on disk."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from axolotl.core.run.checkpoints.finding import newest_verified
from axolotl.core.run.checkpoints.store import is_failed_write
from axolotl.core.trainers.grpo.memory import is_out_of_memory
from axolotl.errors import AxolotlError, EnvironmentFault, Interrupted, MemoryFault, StorageError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class Service:
    """module: where the library that talks to it defines its errors."""

    module: str
    name: str
    code: str
    do: str


_SERVICES = (
    Service(
        "wandb.errors",
        "Weights & Biases",
        "E-ENV-11",
        "run wandb login, correct the wandb_* options, set wandb_mode: offline, or leave out wandb in the config",
    ),
    Service(
        "huggingface_hub.errors",
        "the hub",
        "E-ENV-12",
        "check the login (hf auth whoami) and what it may write to, or leave out hub_model_id and trackio_space_id",
    ),
)


@contextmanager
def named_faults(output_dir: Path) -> Iterator[None]:
    """Out of memory, a full disk, and what the services say that a run logs or uploads to become faults of ours; every
    fault says what is kept.

    output_dir: where checkpoints are looked for.
    """
    try:
        yield
    except AxolotlError as error:
        if not isinstance(error, Interrupted):
            error.saved = error.saved or kept(output_dir)
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryFault(
                "out of memory outside of the training passes",
                why=_first_line(error),
                do="lower micro_batch_size (and raise gradient_accumulation_steps) or trl.max_completion_length",
                saved=kept(output_dir),
            ) from error
        if _is_full_disk(error):
            raise StorageError(
                f"no space left for what the run writes in {output_dir}",
                why=_first_line(error),
                do="free space or set save_total_limit, then rerun train with --resume",
                saved=kept(output_dir),
            ) from error
        service = _service(error)
        if service is None:
            raise
        raise EnvironmentFault(
            f"{service.name}: refused what the run asked for, or cannot be used",
            code=service.code,
            why=_first_line(error),
            do=service.do,
            saved=kept(output_dir),
        ) from error


def _is_full_disk(error: Exception) -> bool:
    return error.errno in _NO_SPACE if isinstance(error, OSError) else is_failed_write(error)


def _service(error: Exception) -> Service | None:
    """Whose error it is, by the module that defines it: neither library has to be imported to know."""
    modules = [kind.__module__ for kind in type(error).__mro__]
    return next(
        (service for service in _SERVICES for module in modules if module.startswith(service.module)),
        None,
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def kept(output_dir: Path) -> str:
    """The `saved` line of a report: the newest checkpoint that is all there, if there is one."""
    newest = newest_verified(output_dir, contents=False).path
    return f"{newest}, resumable with --resume" if newest else "nothing: no checkpoint had been written"
