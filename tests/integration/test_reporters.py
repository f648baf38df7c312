"""Metrics reach wandb, TensorBoard and Trackio through the config's keys, without a network."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.support.cli import run
from tests.support.project import make_project


@pytest.mark.timeout(300)
def test_reporters_get_the_metrics_offline(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("wandb", reason="pip install axolotl[wandb]")
    pytest.importorskip("tensorboard")
    pytest.importorskip("trackio")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_project(tmp_path, tiny_model, max_steps=1)
    options = ["--wandb_project", "p", "--wandb_name", "named", "--wandb_mode", "offline", "--use_tensorboard", "true"]
    options += ["--trackio_project_name", "board"]
    places = {"WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_SILENT": "true"}
    done = run(tmp_path, "train", "config.yaml", *options, **places)
    assert done.code == 0, done.stderr

    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    raw = record.read_bytes()
    assert b"named" in raw and b"rewards/vowels/mean" in raw

    (events,) = (tmp_path / "out" / "runs").rglob("events.out.tfevents.*")
    board = EventAccumulator(str(events.parent)).Reload()
    assert "train/reward" in board.Tags()["scalars"]

    (database,) = (tmp_path / "trackio").glob("board*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select metrics from metrics").fetchall()
    assert any("reward" in str(row[0]) for row in rows)
