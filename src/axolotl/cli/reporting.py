"""How a command ends: the report as the last thing on stderr, `last_error.json`, and the exit code."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from axolotl.cli.streams import steady_streams
from axolotl.core.run.output_dir import LAST_ERROR, is_ours
from axolotl.errors import AxolotlError, InternalError, Interrupted, StorageError

BROKEN_PIPE = 141

# The directory holds an earlier run, somebody else's files, or a run that is alive.
_REFUSED = frozenset({"E-CFG-30", "E-CFG-31"})


def exit_code_of(action: Callable[[], None], *, only_prints: Callable[[], bool]) -> int:
    """Runs a command and reports how it ended.

    Output that cannot be written is discarded and the command goes on, so that training never depends on who reads.

    Args:
        only_prints: whether the command does nothing but print; then output that was lost decides the exit code.
    """
    with steady_streams() as stdout:
        code = _exit_code_of(action)
        sys.stdout.flush()
        lost = None if stdout is None else stdout.problem
        if code != 0 or lost is None or not only_prints():
            return code
        if isinstance(lost, BrokenPipeError):
            # A reader that went away (`| head`) is no fault, and gets no report.
            return BROKEN_PIPE
        error = StorageError("the output could not be written", why=lost.strerror or str(lost))
        print_report(error)
        return error.exit_code


def _exit_code_of(action: Callable[[], None]) -> int:
    try:
        action()
    except AxolotlError as error:
        if isinstance(error, InternalError):
            traceback.print_exception(error)
        print_report(error)
        return error.exit_code
    except KeyboardInterrupt:
        interrupted = _interrupted()
        print_report(interrupted)
        return interrupted.exit_code
    except Exception as error:
        return _report_bug(error)
    return 0


def print_report(error: AxolotlError) -> None:
    """Details, one a line, then the four-line report."""
    sys.stdout.flush()
    for line in error.details:
        print(line, file=sys.stderr)
    print(error.report(), file=sys.stderr, flush=True)


@contextmanager
def recorded_in(output_dir: Path) -> Iterator[None]:
    """Leaves `last_error.json` in the output directory, where there is one, when the block ends with an error.

    A directory that the run was refused is not its own: nothing is written there.
    """
    try:
        yield
    except AxolotlError as error:
        if error.code not in _REFUSED:
            write_last_error(output_dir, error)
        raise
    except KeyboardInterrupt:
        write_last_error(output_dir, _interrupted())
        raise
    except Exception as error:
        write_last_error(output_dir, _bug(error))
        raise


def write_last_error(output_dir: Path, error: AxolotlError) -> None:
    """The report as JSON, where the directory is a run's. What cannot be written must not hide the error itself."""
    try:
        if is_ours(output_dir):
            (output_dir / LAST_ERROR).write_text(json.dumps(error.as_json(), indent=2) + "\n")
    except OSError:
        return


def _report_bug(error: Exception) -> int:
    traceback.print_exception(error)
    print_report(_bug(error))
    return InternalError.exit_code


def _interrupted() -> Interrupted:
    return Interrupted("interrupted", signal_number=signal.SIGINT)


def _bug(error: Exception) -> InternalError:
    return InternalError(
        f"{type(error).__name__}: {error}".splitlines()[0],
        why="this is a bug of axolotl, not a mistake of yours",
        do="please report it, with the traceback above and your config",
    )
