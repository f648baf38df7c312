"""The thread that makes groups: order, bounds, errors, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from axolotl.core.trainers.grpo.rollout import background
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer, Finished
from axolotl.core.trainers.grpo.types import CompletionGroup, Order, PromptRow, Slot
from axolotl.errors import Interrupted, ServerError

DEADLINE_S = 20.0


def order(step: int, groups: int = 2) -> Order:
    return Order(step, 0, step + 1, tuple(Slot(10 * step + place) for place in range(groups)))


def group(row: int) -> CompletionGroup:
    return CompletionGroup(PromptRow(row, "", (1,), {}), ())


class Maker:
    """Makes a group whenever it is let. threads: those that it ran on."""

    def __init__(self, *, is_free: bool = False) -> None:
        self.allowed = threading.Semaphore(10**6 if is_free else 0)
        self.threads: set[str] = set()
        self.begun: list[int] = []
        self.is_closed = threading.Event()
        self.error: BaseException | None = None

    def make(self, wanted: Order) -> Iterator[Finished]:
        self.begun.append(wanted.step)
        self.threads.add(threading.current_thread().name)
        try:
            for place, slot in reversed(list(enumerate(wanted.slots))):
                assert self.allowed.acquire(timeout=DEADLINE_S)
                if self.error is not None:
                    raise self.error
                yield place, group(slot.row)
        finally:
            self.is_closed.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


@contextmanager
def producer(maker: Maker, depth: int) -> Iterator[BackgroundProducer]:
    made = BackgroundProducer(maker.make, depth=depth)
    try:
        yield made
    finally:
        maker.allowed.release(100)
        made.close()


def test_what_is_ready_and_when_the_thread_was_last_heard_of_can_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(background.time, "monotonic", lambda: now)
    maker = Maker(is_free=True)
    with producer(maker, 1) as made:
        now = 103.0
        assert made.metrics == {"producer/ready": 0.0, "producer/heartbeat_age_s": 3.0}
        made.place(order(0))
        made.drain()
        assert made.metrics == {"producer/ready": 1.0, "producer/heartbeat_age_s": 0.0}
        now = 110.0
        assert made.metrics == {"producer/ready": 1.0, "producer/heartbeat_age_s": 7.0}
        assert len(list(made.groups())) == 2 and made.metrics["producer/ready"] == 0.0
    assert BackgroundProducer(maker.make, depth=0).metrics == {}


def test_groups_are_handed_out_while_the_rest_is_made() -> None:
    maker = Maker()
    with producer(maker, 0) as made:
        made.place(order(0))
        groups = made.groups()
        maker.allowed.release()
        assert next(groups)[0] == 1
        maker.allowed.release()
        assert next(groups)[0] == 0
        assert next(groups, None) is None
    assert maker.threads == {"axolotl-producer"}


def test_orders_are_made_in_advance_one_after_the_other_and_no_more_than_the_depth() -> None:
    maker = Maker(is_free=True)
    with producer(maker, 2) as made:
        for step in range(3):
            made.place(order(step))
        until(lambda: made.num_ready == 3)
        assert maker.begun == [0, 1, 2]
        assert [item.step for item in made.placed] == [0, 1, 2]
        with pytest.raises(AssertionError, match="before another one is placed"):
            made.place(order(3))
        for step in range(3):
            assert {item.row.index for _, item in made.groups()} == {10 * step, 10 * step + 1}
        assert made.placed == ()


def test_what_went_wrong_is_raised_where_the_groups_are_taken() -> None:
    maker = Maker()
    maker.error = ServerError("gone", code="E-SRV-04")
    with producer(maker, 1) as made:
        made.place(order(0))
        maker.allowed.release()
        with pytest.raises(ServerError, match="gone"):
            list(made.groups())


def test_finished_orders_can_be_kept_and_adopted() -> None:
    maker = Maker(is_free=True)
    with producer(maker, 1) as made:
        made.place(order(0))
        made.place(order(1))
        made.drain()
        kept = made.finished()
    assert [item.step for item, _ in kept] == [0, 1]
    other = Maker(is_free=True)
    with producer(other, 1) as again:
        for wanted, groups in kept:
            again.adopt(wanted, groups)
        assert [sorted(item.row.index for _, item in again.groups()) for _ in kept] == [[0, 1], [10, 11]]
        assert other.begun == []


def test_closing_gives_up_what_is_being_made() -> None:
    maker = Maker()
    made = BackgroundProducer(maker.make, depth=1)
    made.place(order(0, groups=50))
    until(lambda: maker.begun == [0])
    maker.allowed.release(10)
    made.close()
    assert maker.is_closed.wait(DEADLINE_S)
    assert not any(thread.name == "axolotl-producer" for thread in threading.enumerate())


def test_a_wait_can_be_interrupted() -> None:
    @contextmanager
    def waiting() -> Iterator[None]:
        raise Interrupted("stopped", signal_number=2)
        yield

    maker = Maker()
    made = BackgroundProducer(maker.make, depth=0, waiting=waiting)
    made.place(order(0))
    with pytest.raises(Interrupted):
        next(made.groups())
    maker.allowed.release(10)
    made.close()


def test_a_thread_that_is_gone_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "POLL_S", 0.01)
    made = BackgroundProducer(Maker().make, depth=0)
    monkeypatch.setattr(made, "_run", lambda: None)
    made.place(order(0))
    with pytest.raises(ServerError) as caught:
        next(made.groups())
    assert caught.value.code == "E-SRV-25"
