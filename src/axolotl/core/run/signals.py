"""Ctrl-C and SIGTERM: stop at the next step boundary, or out of a wait for the server, and save; a second Ctrl-C
leaves at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from axolotl.errors import Interrupted


@dataclass
class StopRequest:
    """received: the number of the signal that asked the run to stop, None while nobody has. is_urgent: Ctrl-C came
    a second time."""

    received: int | None = None
    is_urgent: bool = False
    _is_listening: bool = False

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
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Interrupted` when a stop was asked for; called about once a second by whoever waits for the server.

        Outside of `listening` nothing is raised: a run that has trained to its end is saved as such.
        """
        if self._is_listening and self.received is not None:
            raise Interrupted("stopped by a signal while waiting for the server", signal_number=self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            self.is_urgent = True
            raise Interrupted("interrupted twice: left without saving", signal_number=number)
        self.received = number


class StopAtBoundary(TrainerCallback):
    """Turns a stop request into transformers' own save and stop at the end of an optimizer step."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._request.received is not None:
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
        signal.signal(signal.SIGTERM, previous)
