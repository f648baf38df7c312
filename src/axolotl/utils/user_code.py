"""Where in the user's own code an exception came from."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from axolotl.errors import Interrupted

_OUR_PACKAGE = str(Path(__file__).resolve().parents[1])

_LONGEST = 300


def _directories(*names: str) -> tuple[str, ...]:
    return tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in names})


_INSTALLED = _directories("purelib", "platlib")
_PYTHON = _directories("stdlib", "platstdlib")


def pass_interruption(error: BaseException) -> None:
    """Raises the `Interrupted` that `error` is, or that other code caught and wrapped: it is no fault of that code.

    The first thing in every handler of all exceptions around code that is not ours.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, Interrupted):
            raise link
        seen.add(id(link))
        link = link.__cause__ or link.__context__


def user_frames(error: BaseException) -> tuple[traceback.FrameSummary, ...]:
    """The frames of `error` in files that belong to neither Python, an installed package nor this program, outermost
    first. Where there are none, because the user's code is itself an installed package: every frame in an installed
    package below the last one of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [_place_of(frame.filename) for frame in frames]
    own = tuple(frame for frame, place in zip(frames, places, strict=True) if place == "user")
    if own or "ours" not in places:
        return own
    below = len(places) - places[::-1].index("ours")
    return tuple(frame for frame, place in list(zip(frames, places, strict=True))[below:] if place == "installed")


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
    """`KeyError: 'answer'`, cut where the message goes on and on."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place_of(filename: str) -> str:
    """`user`, `ours`, `installed` (site-packages) or `python` (the standard library)."""
    if filename.startswith("<frozen"):
        return "python"
    path = str(Path(filename).resolve())
    if path.startswith(_OUR_PACKAGE):
        return "ours"
    if path.startswith(_INSTALLED):
        return "installed"
    return "python" if path.startswith(_PYTHON) else "user"
