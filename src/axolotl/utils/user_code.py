"""Where in the user's own code an exception came from."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_OUR_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def user_frames(error: BaseException) -> tuple[traceback.FrameSummary, ...]:
    """The frames of `error` in files that belong to neither Python, an installed package nor this program, outermost
    first. When the user's code is itself an installed package: every frame below the last one of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if own:
        return tuple(own)
    last_of_ours = max((i for i, frame in enumerate(frames) if _is_ours(frame.filename)), default=-1)
    below = frames[last_of_ours + 1 :]
    return tuple(frame for frame in below if not frame.filename.startswith("<frozen"))


def error_place(error: BaseException) -> str:
    """`rewards.py:14` of the innermost line of the user's code, "" when the error has none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = user_frames(error)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def error_lines(error: BaseException) -> tuple[str, ...]:
    """The user's frames and the exception as Python prints them, one line each, for an error's `details`."""
    frames = user_frames(error)
    lines = traceback.format_list(list(frames)) + traceback.format_exception_only(error)
    return tuple("".join(lines).rstrip("\n").split("\n"))


def one_line(error: BaseException) -> str:
    """`KeyError: 'answer'`."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OUR_PACKAGE)


def _is_library(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return True
    path = str(Path(filename).resolve())
    return _is_ours(path) or path.startswith(_LIBRARIES)
