from __future__ import annotations

import json
from pathlib import Path

import pytest

from axolotl.errors import Interrupted
from axolotl.utils.user_code import error_lines, error_place, one_line, pass_interruption, user_frames


def user_error(file: Path, source: str) -> BaseException:
    """The exception that `source`, as the user's own file, raises."""
    file.write_text(source)
    try:
        exec(compile(source, str(file), "exec"), {"json": json})
    except Exception as error:
        return error
    raise AssertionError("the source raised nothing")


def test_the_users_line_is_named_although_the_library_raised(tmp_path: Path) -> None:
    error = user_error(tmp_path / "mine.py", "text = '{'\n\njson.loads(text)\n")
    assert error_place(error) == "mine.py:3"
    assert [Path(frame.filename).name for frame in user_frames(error)][-1] == "mine.py"
    assert not any("json/decoder" in line for line in error_lines(error))
    assert error_lines(error)[-1].startswith("json.decoder.JSONDecodeError: ")


def test_one_line_has_no_line_breaks() -> None:
    assert one_line(ValueError("first\n   second")) == "ValueError: first second"
    assert one_line(KeyError("answer")) == "KeyError: 'answer'"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(ValueError("x" * 1000)) == "ValueError: " + "x" * 300 + " ..."


def test_an_error_without_frames_has_no_place() -> None:
    assert error_place(ValueError("never raised")) == ""
    assert error_lines(ValueError("never raised")) == ("ValueError: never raised",)


@pytest.mark.parametrize("wraps", [False, True])
def test_an_interruption_goes_through_also_when_other_code_wrapped_it(wraps: bool) -> None:
    interrupted = Interrupted("stop", signal_number=15)
    error: BaseException = interrupted
    if wraps:
        error = RuntimeError("generating rows failed")
        error.__cause__ = ValueError("a row")
        error.__cause__.__context__ = interrupted
    with pytest.raises(Interrupted) as caught:
        pass_interruption(error)
    assert caught.value is interrupted


def test_other_errors_are_no_interruption() -> None:
    error = ValueError("x")
    error.__cause__ = KeyError("y")
    pass_interruption(error)
