from __future__ import annotations

import json
from pathlib import Path

from axolotl.utils.user_code import error_lines, error_place, one_line, user_frames


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
