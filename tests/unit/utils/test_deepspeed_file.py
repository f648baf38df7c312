from pathlib import Path

import pytest

from axolotl.errors import ConfigError
from axolotl.utils.deepspeed_file import find_deepspeed_file, shipped_files


def test_the_working_directory_comes_before_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    for place in (beside, here):
        place.mkdir()
    (beside / "zero.json").write_text("{}")
    monkeypatch.chdir(here)
    assert find_deepspeed_file("zero.json", beside) == beside / "zero.json"
    (here / "zero.json").write_text("{}")
    assert find_deepspeed_file("zero.json", beside) == here / "zero.json"


def test_shipped_files_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"deepspeed_configs/{name}.json" for name in ("zero1", "zero2", "zero3", "zero3_bf16")]
    assert shipped_files() == names
    assert all(find_deepspeed_file(name, tmp_path).is_file() for name in names)


def test_a_file_that_is_nowhere_is_an_error_with_the_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file zero9") as problem:
        find_deepspeed_file("zero9.json", tmp_path)
    assert str(tmp_path) in problem.value.why and "zero3_bf16" in problem.value.do
