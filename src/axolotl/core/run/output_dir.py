"""The directory of a run: what we wrote in it, and what may be deleted to start again.

Everything the program writes is noted in `.axolotl/written.json`. `--overwrite` deletes what is noted there and
nothing else: a user's own files in the directory stay.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from axolotl.core.run.checkpoints.manifest import MANIFEST, ManifestError, read_manifest
from axolotl.core.run.checkpoints.store import temporaries
from axolotl.errors import ConfigError, EnvironmentFault

_NOTES = Path(".axolotl") / "written.json"
LAST_ERROR = "last_error.json"
RESOLVED_CONFIG = "config.resolved.yaml"
SERVER_LOG = "server.log"

_WRITTEN_AT_THE_END = (
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "metrics.jsonl",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_args.bin",
)

# What a run leaves that ended before its first step: nothing that starting over could lose.
_DISPOSABLE = frozenset({LAST_ERROR, RESOLVED_CONFIG, SERVER_LOG})


# What transformers and PEFT put into a checkpoint.
_CHECKPOINT_FILE = re.compile(
    r"(adapter_)?(model|config)(-\d+-of-\d+)?(\.safetensors(\.index)?)?(\.json)?|README\.md|added_tokens\.json"
    r"|chat_template\.jinja|generation_config\.json|merges\.txt|optimizer\.pt|rng_state(_\d+)?\.pth|scaler\.pt"
    r"|scheduler\.pt|special_tokens_map\.json|tokenizer(_config)?\.(json|model)|trainer_state\.json"
    r"|training_args\.bin|vocab\.json"
)


class OutputDir:
    """An output directory that remembers what it was given. Make one with `open`."""

    def __init__(self, path: Path, written: set[str], *, is_noting: bool = True) -> None:
        self.path = path
        self._written = written
        self._is_noting = is_noting

    @classmethod
    def shared(cls, path: Path) -> OutputDir:
        """As another process has opened it, which keeps the notes."""
        return cls(path, set(), is_noting=False)

    @classmethod
    def open(cls, path: Path, *, overwrite: bool = False, resume: bool = False) -> OutputDir:
        """Create or enter the directory.

        Raises:
            ConfigError: it holds something and neither flag is given.
            EnvironmentFault: it cannot be made or written to.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            output = cls(path, _read_notes(path))
            if overwrite and not resume:
                output._refuse_foreign()
                output._delete_written()
            elif not resume and _has_results(path):
                raise ConfigError(
                    f"output_dir {path} is not empty",
                    code="E-CFG-30",
                    why="a run that starts over would mix with what is there",
                    do="add --resume to go on, --overwrite to delete what an earlier run wrote, or set output_dir",
                )
            output.note(path / LAST_ERROR)
        except OSError as error:
            raise EnvironmentFault(
                f"output_dir {path} cannot be used", code="E-ENV-08", why=error.strerror or str(error)
            ) from error
        return output

    def file(self, name: str) -> Path:
        """The path of a file that the caller is about to write; `EnvironmentFault` where a directory has its name."""
        if (self.path / name).is_dir():
            raise EnvironmentFault(
                f"{self.path / name} is a directory, and the run writes a file of that name",
                code="E-ENV-08",
                do="move it away, or set output_dir",
            )
        self.note(self.path / name)
        return self.path / name

    def is_newest(self, checkpoint: Path) -> bool:
        """Whether no checkpoint of a later step is here: the final model is the one that belongs to it."""
        steps = [_step_of(item) for item in self.path.iterdir() if item.is_dir()]
        return _step_of(checkpoint) >= max(steps, default=-1)

    def announce(self, name: str) -> None:
        """A directory that is about to be written; one that exists already is not taken for ours."""
        if not (self.path / name).exists():
            self.note(self.path / name)

    def note(self, *paths: Path) -> None:
        """Remember files, or all files below directories, as ours."""
        for path in paths:
            files = [item for item in path.rglob("*") if not item.is_dir()] if path.is_dir() else [path]
            self._written.update(str(item.relative_to(self.path)) for item in files)
        self._save_notes()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Remember the files that appear directly in the directory while the block runs."""
        before = {item for item in self.path.iterdir() if item.is_file()}
        # Noted in advance, so that a run killed while it saves leaves nothing that looks like a user's.
        self.note(*(self.path / name for name in _WRITTEN_AT_THE_END if not (self.path / name).exists()))
        yield
        self.note(*({item for item in self.path.iterdir() if item.is_file()} - before))

    def _refuse_foreign(self) -> None:
        """A file of the user's under a name that the run writes would be lost."""
        foreign = [name for name in _WRITTEN_AT_THE_END if (self.path / name).exists() and name not in self._written]
        if foreign:
            raise ConfigError(
                f"output_dir {self.path} holds {foreign[0]}, which is not ours and would be overwritten",
                code="E-CFG-30",
                why="--overwrite touches only what an earlier run wrote",
                do="move that file away, or set output_dir",
            )

    def _delete_written(self) -> None:
        for temporary in temporaries(self.path):
            shutil.rmtree(temporary, ignore_errors=True)
        parents: set[Path] = set()
        for name in self._written | self._half_written():
            item = self.path / name
            if not item.is_dir():
                item.unlink(missing_ok=True)
            parents.update(parent for parent in item.parents if parent.is_relative_to(self.path))
        for directory in sorted(parents - {self.path}, key=lambda item: len(item.parts), reverse=True):
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()
        self._written.clear()

    def _half_written(self) -> set[str]:
        """Files of announced checkpoints that a run was killed after, before it could note them."""
        files: set[Path] = set()
        for checkpoint in (self.path / name for name in self._written if (self.path / name).is_dir()):
            files.update(item for item in checkpoint.iterdir() if _CHECKPOINT_FILE.fullmatch(item.name))
            with suppress(OSError, ManifestError):
                files.update(checkpoint / name for name in (*read_manifest(checkpoint), MANIFEST))
        return {str(item.relative_to(self.path)) for item in files if item.is_file()}

    def _save_notes(self) -> None:
        if not self._is_noting:
            return
        notes = self.path / _NOTES
        notes.parent.mkdir(exist_ok=True)
        temporary = notes.with_suffix(".tmp")
        temporary.write_text(json.dumps(sorted(self._written), indent=0))
        temporary.replace(notes)


def _step_of(path: Path) -> int:
    """Of a directory `checkpoint-N`, -1 for any other."""
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else -1


def is_ours(path: Path) -> bool:
    """Whether this is a directory that a run wrote in, or that holds nothing that a run could spoil."""
    return path.is_dir() and ((path / _NOTES).is_file() or not _has_results(path))


def _has_results(path: Path) -> bool:
    ours = _DISPOSABLE | {_NOTES.parent.name}
    return any(item.name not in ours and not _is_empty_directory(item) for item in path.iterdir())


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _read_notes(path: Path) -> set[str]:
    """The noted files; names that lead out of the directory are not ours, whoever wrote them."""
    notes = path / _NOTES
    if not notes.exists():
        return set()
    try:
        names = json.loads(notes.read_text())
    except ValueError:
        return set()
    if not isinstance(names, list):
        return set()
    root = path.resolve()
    texts = (name for name in names if isinstance(name, str) and "\0" not in name)
    return {name for name in texts if (path / name).resolve().is_relative_to(root)}
