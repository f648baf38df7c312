"""What is saved when a run ends between two steps, and what is said about it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axolotl.core.run.emergency import emergency_checkpoint
from axolotl.core.run.signals import StopRequest
from axolotl.errors import (
    AxolotlError,
    ConfigError,
    DataError,
    Interrupted,
    PeerError,
    RewardError,
    ServerError,
    StorageError,
    SyncError,
)
from tests.support.checkpoints import saved, truncate


class Trainer:
    """What the emergency needs of transformers' trainer; saving goes through the store, or fails.

    is_agreed: whether all ranks have ended at the same place.
    """

    def __init__(self, output: Path, step: int, failure: Exception | None = None, *, is_agreed: bool = True) -> None:
        self.pipeline = SimpleNamespace(world=SimpleNamespace(may_save=lambda fault: is_agreed))
        self.state = SimpleNamespace(global_step=step)
        self.args, self.control, self.model = object(), object(), object()
        self.saved: list[int] = []
        self.callback_handler = SimpleNamespace(on_save=self._on_save)
        self._output, self._failure = output, failure

    def _save_checkpoint(self, model: object, trial: object) -> None:
        if self._failure:
            raise self._failure
        saved(self._output, self.state.global_step)

    def _on_save(self, args: object, state: Any, control: object) -> object:
        self.saved.append(state.global_step)
        return control


def end(trainer: Trainer, output: Path, error: AxolotlError, *, is_urgent: bool = False) -> AxolotlError:
    with (
        pytest.raises(type(error)) as problem,
        emergency_checkpoint(trainer, output, is_urgent=lambda: is_urgent),  # type: ignore[arg-type]
    ):
        raise error
    assert problem.value is error
    return error


@pytest.mark.parametrize(
    "error",
    [
        ServerError("lost"),
        SyncError("refused"),
        ConfigError("no such metric"),
        StorageError("the sync directory is full"),
        Interrupted("stopped", signal_number=signal.SIGTERM),
    ],
)
def test_the_last_finished_step_is_saved_and_named(tmp_path: Path, error: AxolotlError) -> None:
    trainer = Trainer(tmp_path, 7)
    assert "checkpoint-7" in end(trainer, tmp_path, error).saved
    assert trainer.saved == [7], "callbacks know of it too"


@pytest.mark.parametrize(
    ("there", "is_saved"), [(ServerError, True), (StorageError, True), (RewardError, False), (None, False)]
)
def test_what_another_rank_ended_with_is_saved_as_if_it_were_our_own(
    tmp_path: Path, there: type[AxolotlError] | None, is_saved: bool
) -> None:
    trainer = Trainer(tmp_path, 7)
    end(trainer, tmp_path, PeerError("process 1: x", exit_code_there=there.exit_code if there else None))
    assert bool(trainer.saved) is is_saved


def test_a_rank_alone_saves_nothing(tmp_path: Path) -> None:
    """Saving takes all of them."""
    trainer = Trainer(tmp_path, 7, is_agreed=False)
    end(trainer, tmp_path, ServerError("lost"))
    assert trainer.saved == []


def test_one_that_exists_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    trainer = Trainer(tmp_path, 7)
    assert "checkpoint-7" in end(trainer, tmp_path, ServerError("lost")).saved
    assert trainer.saved == []


def test_one_that_is_cut_short_is_saved_again(tmp_path: Path) -> None:
    truncate(saved(tmp_path, 7)[0] / "optimizer.pt")
    trainer = Trainer(tmp_path, 7)
    assert "checkpoint-7" in end(trainer, tmp_path, ServerError("lost")).saved
    assert trainer.saved == [7]


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    assert "nothing" in end(Trainer(tmp_path, 0), tmp_path, ServerError("lost")).saved
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_is_told(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    error = end(Trainer(tmp_path, 7, OSError(28, "No space left")), tmp_path, ServerError("lost"))
    assert error.what == "lost" and "No space left" in error.details[0]
    assert "checkpoint-5" in error.saved and not (tmp_path / "checkpoint-7").exists()


def test_other_faults_save_nothing(tmp_path: Path) -> None:
    end(Trainer(tmp_path, 7), tmp_path, DataError("wrong"))
    assert list(tmp_path.iterdir()) == []


def test_who_is_in_a_hurry_waits_for_no_save(tmp_path: Path) -> None:
    end(Trainer(tmp_path, 7), tmp_path, Interrupted("twice", signal_number=signal.SIGINT), is_urgent=True)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_a_wait_at_once() -> None:
    stop = StopRequest()
    read, write = socket.socketpair()
    sender = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with read, write, stop.listening():
        sender.start()
        with pytest.raises(Interrupted) as problem, stop.interruptible():
            read.recv(1)
        assert problem.value.exit_code == 143
    sender.join()


def test_a_signal_that_came_before_the_wait_ends_it_too() -> None:
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted), stop.interruptible():
            pytest.fail("not waited for")
    with stop.interruptible():
        """After the training nothing is interrupted any more."""


def test_outside_of_a_wait_a_signal_is_only_noted() -> None:
    stop = StopRequest()
    with stop.listening():
        with stop.interruptible():
            """Nothing came."""
        signal.raise_signal(signal.SIGTERM)
    assert stop.received == signal.SIGTERM


def test_a_second_interrupt_is_urgent() -> None:
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        assert not stop.is_urgent
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    assert stop.is_urgent
