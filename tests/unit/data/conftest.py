from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from tests.support.user_modules import imports_undone


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets-cache"))


@pytest.fixture(autouse=True)
def _imports_undone() -> Iterator[None]:
    with imports_undone():
        yield


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty, and not the directory of the config."""
    directory = tmp_path_factory.mktemp("working-directory")
    monkeypatch.chdir(directory)
    return directory
