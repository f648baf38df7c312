from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict

from axolotl.data.sources import load_rows
from axolotl.errors import DataError, Interrupted
from axolotl.utils.schemas.datasets import DatasetConfig

ROWS = Dataset.from_dict({"prompt": ["a", "b", "c", "d"], "answer": [1, 2, 3, 4]})


def load(directory: Path, path: str, **options: Any) -> Dataset:
    return load_rows(DatasetConfig(path=path, **options), [directory / "first", directory], "datasets[0]")


def failure(directory: Path, path: str, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        load(directory, path, **options)
    assert caught.value.what.startswith("datasets[0]") and caught.value.do
    return caught.value


def write(directory: Path, kind: str) -> str:
    """ROWS as a file of that kind; its name."""
    name = f"rows.{kind}"
    file = directory / name
    if kind == "jsonl":
        ROWS.to_json(file)
    elif kind == "json":
        ROWS.to_json(file, lines=False)
    elif kind == "csv":
        ROWS.to_csv(file)
    elif kind == "tsv":
        ROWS.to_csv(file, sep="\t")
    elif kind == "parquet":
        ROWS.to_parquet(file)
    elif kind == "jsonl.gz":
        ROWS.to_json(file, compression="gzip")
    else:
        ROWS.save_to_disk(directory / "saved")
        shutil.move(directory / "saved" / "data-00000-of-00001.arrow", file)
    return name


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz"])
def test_files_of_every_format(tmp_path: Path, kind: str) -> None:
    rows = load(tmp_path, write(tmp_path, kind))
    assert rows.to_dict() == ROWS.to_dict()


def test_ds_type_tells_the_format_where_the_name_does_not(tmp_path: Path) -> None:
    (tmp_path / write(tmp_path, "jsonl")).rename(tmp_path / "rows.data")
    assert len(load(tmp_path, "rows.data", ds_type="json")) == 4
    assert "format of" in failure(tmp_path, "rows.data").what


def test_slices_of_a_split(tmp_path: Path) -> None:
    name = write(tmp_path, "jsonl")
    assert load(tmp_path, name, split="train[1:3]")["prompt"][:] == ["b", "c"]
    assert load(tmp_path, name, split="test[:50%]")["prompt"][:] == ["a", "b"]
    assert "several splits" in failure(tmp_path, name, split="train+test").what
    assert failure(tmp_path, name, split="train[1:").code == "E-DAT-01"


def test_the_first_directory_that_has_it_wins_and_absolute_paths_work(tmp_path: Path) -> None:
    name = write(tmp_path, "jsonl")
    (tmp_path / "first").mkdir()
    ROWS.select([3]).to_json(tmp_path / "first" / name)
    assert load(tmp_path, name)["answer"][:] == [4]
    assert len(load(tmp_path / "unrelated", str(tmp_path / name))) == 4


def test_a_directory_of_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "jsonl")
    assert len(load(tmp_path, "data")) == 4
    assert len(load(tmp_path, "data", data_files="rows.jsonl")) == 4
    assert len(load(tmp_path, "json", data_files=["data/rows.jsonl"])) == 4
    assert "there is no file other.jsonl" in failure(tmp_path, "data", data_files="other.jsonl").what


CARD = """---
configs:
- config_name: main
  data_files: part/rows.jsonl
---
"""


def test_name_is_a_configuration_of_a_directory_where_it_has_some(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain", "jsonl")
    assert len(load(tmp_path, "plain", name="main")) == 4
    assert len(load(tmp_path, "plain/rows.jsonl", name="main")) == 4
    (tmp_path / "nested" / "main").mkdir(parents=True)
    write(tmp_path / "nested" / "main", "jsonl")
    assert len(load(tmp_path, "nested", name="main")) == 4
    (tmp_path / "card" / "part").mkdir(parents=True)
    write(tmp_path / "card" / "part", "jsonl")
    (tmp_path / "card" / "README.md").write_text(CARD)
    assert len(load(tmp_path, "card", name="main")) == 4
    assert "'other' not found" in failure(tmp_path, "card", name="other").why


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    ROWS.save_to_disk(tmp_path / "one")
    DatasetDict({"train": ROWS, "test": ROWS.select([0])}).save_to_disk(tmp_path / "several")
    assert load(tmp_path, "one")["answer"][:] == [1, 2, 3, 4]
    assert load(tmp_path, "one", split="train[-1:]")["answer"][:] == [4]
    assert load(tmp_path, "several", split="test")["answer"][:] == [1]
    assert "no split 'dev'; it has train, test" in failure(tmp_path, "several", split="dev").what


def test_a_missing_file_names_every_place_that_was_tried(tmp_path: Path) -> None:
    error = failure(tmp_path, "nope.jsonl")
    assert error.code == "E-DAT-05" and error.exit_code == 4
    assert str(tmp_path / "first" / "nope.jsonl") in error.why and str(tmp_path / "nope.jsonl") in error.why
    assert "no file or directory ./nope" in failure(tmp_path, "./nope").what


def test_an_unreachable_hub_names_the_way_out(tmp_path: Path) -> None:
    error = failure(tmp_path, "openai/gsm8k", name="main")
    assert error.code == "E-DAT-05"
    assert "openai/gsm8k is neither on this machine" in error.what
    assert "HF_HUB_OFFLINE" in error.why and str(tmp_path / "openai" / "gsm8k") in error.why
    assert "local file" in error.do


def test_a_damaged_file_shows_the_readers_own_reason(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    error = failure(tmp_path, "bad.jsonl")
    assert error.code == "E-DAT-01" and "bad.jsonl cannot be read" in error.what and "JSON" in error.why


@pytest.mark.parametrize("text", ["", "[]"])
def test_an_empty_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.json").write_text(text)
    error = failure(tmp_path, "empty.json")
    assert error.code == "E-DAT-04" and "empty.json holds no rows" in error.what


def test_an_empty_slice_is_an_error(tmp_path: Path) -> None:
    error = failure(tmp_path, write(tmp_path, "jsonl"), split="train[:0]")
    assert error.code == "E-DAT-04" and "holds no rows in split train[:0]" in error.what


@pytest.mark.parametrize(("loader", "path"), [("load_dataset", "rows.jsonl"), ("load_from_disk", "saved")])
def test_an_interruption_is_not_the_files_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, path: str
) -> None:
    write(tmp_path, "jsonl")
    ROWS.save_to_disk(tmp_path / "saved")

    def stopped(*_: Any, **__: Any) -> Dataset:
        try:
            raise Interrupted("stop", signal_number=15)
        except Interrupted as error:
            raise RuntimeError("while generating the data set") from error

    monkeypatch.setattr(datasets, loader, stopped)
    with pytest.raises(Interrupted):
        load(tmp_path, path)


@pytest.mark.parametrize("split", ["train[:", "train[a:b]", "train[:200%]"])
def test_a_slice_that_means_nothing(tmp_path: Path, split: str) -> None:
    ROWS.save_to_disk(tmp_path / "one")
    error = failure(tmp_path, "one", split=split)
    assert split in error.what and "train[:1000]" in error.do
