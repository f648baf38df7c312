"""Ctrl-C and SIGTERM: stop at the next step boundary, or out of a wait for the server, and save; a second Ctrl-C
leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from axolotl.errors import Interrupted


@dataclass
class StopRequest:
    """received: the number of the signal that asked the run to stop, None while nobody has. is_urgent: Ctrl-C came
    a second time."""

    received: int | None = None
    is_urgent: bool = False
    _is_listening: bool = False
    _is_waiting: bool = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM while the block runs; the handlers before it come back afterwards."""
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        self._is_listening = True
        try:
            yield
        finally:
            self._is_listening = False
            for number, handler in previous.items():
                _give_back(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A wait for the server: a signal that comes inside, or has come already, raises `Interrupted` at once.

        Nothing that the run computes happens inside, so the last finished step can still be saved. Outside of
        `listening` nothing is raised: a run that has trained to its end is saved as such. Python runs handlers on the
        main thread only, so that on another thread this does nothing.
        """
        if not self._is_listening or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_waiting = True
        try:
            self._leave_wait()
            yield
        finally:
            self._is_waiting = False

    def _leave_wait(self) -> None:
        if self.received is not None:
            raise Interrupted("stopped by a signal while waiting for the server", signal_number=self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            self.is_urgent = True
            raise Interrupted("interrupted twice: left without saving", signal_number=number)
        self.received = number
        if self._is_waiting:
            self._leave_wait()


class StopAtBoundary(TrainerCallback):
    """Turns a stop request into transformers' own save and stop at the end of an optimizer step.

    agree: the largest of one number a rank; a signal that one of them got stops all.
    """

    def __init__(self, request: StopRequest, agree: Callable[[float], float] = float) -> None:
        self._request = request
        self._agree = agree

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        received = int(self._agree(self._request.received or 0))
        if received:
            self._request.received = received
            control.should_save = True
            control.should_training_stop = True


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Before and after training there is no step to wait for: SIGTERM unwinds the program and ends what it started."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Interrupted("stopped by SIGTERM outside of training", signal_number=number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        _give_back(signal.SIGTERM, previous)


def _give_back(number: int, handler: Any) -> None:
    """A signal that a run with several processes ignores while it ends stays ignored until it has."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)
