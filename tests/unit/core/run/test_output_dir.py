from pathlib import Path

import pytest

from axolotl.core.run.checkpoints.store import CheckpointStore
from axolotl.core.run.output_dir import OutputDir, is_ours
from axolotl.errors import ConfigError, EnvironmentFault
from tests.support.checkpoints import write


def finished(path: Path) -> OutputDir:
    """A directory as a run leaves it."""
    output = OutputDir.open(path)
    output.file("metrics.jsonl").write_text("{}")
    checkpoint = path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "adapter.safetensors").write_text("a")
    output.note(checkpoint)
    with output.saving():
        (path / "adapter_config.json").write_text("{}")
    return output


def names(path: Path) -> set[str]:
    return {str(item.relative_to(path)) for item in path.rglob("*") if item.is_file()} - {".axolotl/written.json"}


def test_a_run_does_not_start_over_on_results(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    with pytest.raises(ConfigError, match="is not empty"):
        OutputDir.open(tmp_path / "out")
    assert "metrics.jsonl" in names(tmp_path / "out")


def test_overwrite_deletes_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "checkpoint-2" / "mine.txt").write_text("mine")
    OutputDir.open(tmp_path / "out", overwrite=True)
    assert names(tmp_path / "out") == {"notes.txt", "checkpoint-2/mine.txt"}


def test_resume_keeps_everything(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    OutputDir.open(tmp_path / "out", resume=True)
    assert "checkpoint-2/adapter.safetensors" in names(tmp_path / "out")


def test_what_a_failed_start_leaves_does_not_stand_in_the_way(tmp_path: Path) -> None:
    output = OutputDir.open(tmp_path / "out")
    for name in ("last_error.json", "config.resolved.yaml", "server.log"):
        output.file(name).write_text("x")
    OutputDir.open(tmp_path / "out")


def test_a_directory_of_foreign_files_needs_a_decision(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError):
        OutputDir.open(tmp_path)
    OutputDir.open(tmp_path, overwrite=True)
    assert names(tmp_path) == {"thesis.tex"}


def test_notes_that_lead_out_of_the_directory_delete_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    output = finished(tmp_path / "out")
    notes = tmp_path / "out" / ".axolotl" / "written.json"
    notes.write_text('["../precious", "metrics.jsonl", "adapter_config.json"]')
    OutputDir.open(output.path, overwrite=True)
    assert (tmp_path / "precious").exists() and not (tmp_path / "out" / "metrics.jsonl").exists()


def test_an_output_dir_that_is_a_file_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be used"):
        OutputDir.open(tmp_path / "out")


def test_overwrite_does_not_write_over_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"README\.md, which is not ours"):
        OutputDir.open(tmp_path, overwrite=True)


def checkpoint_4(out: Path) -> None:
    (out / "checkpoint-4").mkdir(parents=True)
    for name in ("optimizer.pt", "trainer_state.json", "adapter_model.safetensors", "mine.txt"):
        (out / "checkpoint-4" / name).write_text("x")


def test_overwrite_deletes_a_checkpoint_that_a_run_was_killed_in(tmp_path: Path) -> None:
    out = tmp_path / "out"
    OutputDir.open(out).announce("checkpoint-4")
    checkpoint_4(out)
    OutputDir.open(out, overwrite=True)
    assert names(out) == {"checkpoint-4/mine.txt"}


def test_overwrite_deletes_what_a_run_was_killed_in_while_it_saved_or_had_just_saved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store = CheckpointStore(out, announce=OutputDir.open(out).announce)
    (store.save(4, write) / "mine.txt").write_text("mine")
    (out / ".tmp-checkpoint-5" / "checkpoint-5").mkdir(parents=True)
    (out / ".tmp-checkpoint-5" / "checkpoint-5" / "optimizer.pt").write_text("half")
    OutputDir.open(out, overwrite=True)
    assert names(out) == {"checkpoint-4/mine.txt"}
    assert {item.name for item in out.iterdir()} == {".axolotl", "checkpoint-4"}


def test_a_checkpoint_that_was_there_before_is_never_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    checkpoint_4(out)
    for _ in range(2):
        OutputDir.open(out, overwrite=True).announce("checkpoint-4")
    assert (out / "checkpoint-4" / "optimizer.pt").exists()


@pytest.mark.parametrize("notes", ["5", '["a\\u0000b", 7]'], ids=["no list", "no paths"])
def test_damaged_notes_count_as_none(notes: str, tmp_path: Path) -> None:
    (tmp_path / "out" / ".axolotl").mkdir(parents=True)
    (tmp_path / "out" / ".axolotl" / "written.json").write_text(notes)
    (tmp_path / "out" / "a").write_text("mine")
    OutputDir.open(tmp_path / "out", overwrite=True)
    assert "a" in names(tmp_path / "out")


def test_a_directory_under_the_name_of_a_file_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(EnvironmentFault, match="is a directory"):
        OutputDir.open(tmp_path / "out").file("metrics.jsonl")


def test_whose_a_directory_is(tmp_path: Path) -> None:
    assert not is_ours(tmp_path / "out")
    finished(tmp_path / "out")
    assert is_ours(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert is_ours(tmp_path / "empty")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    assert not is_ours(tmp_path / "thesis")


def test_the_final_model_belongs_to_the_newest_checkpoint(tmp_path: Path) -> None:
    for name in ("checkpoint-4", "checkpoint-12", "checkpoint-x", "other"):
        (tmp_path / name).mkdir()
    output = OutputDir.open(tmp_path, resume=True)
    assert output.is_newest(tmp_path / "checkpoint-12")
    assert output.is_newest(Path("elsewhere/checkpoint-12"))
    assert not output.is_newest(tmp_path / "checkpoint-4")
