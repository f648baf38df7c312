from __future__ import annotations

import asyncio

import pytest

from axolotl.serving.engines.traffic import Traffic


def test_the_stop_waits_for_what_runs_and_holds_up_what_comes() -> None:
    async def scenario() -> list[str]:
        order: list[str] = []
        traffic, gate, stopping = Traffic(), asyncio.Event(), asyncio.Event()

        async def first() -> None:
            await gate.wait()
            order.append("first ended")

        async def replace() -> None:
            stopping.set()
            async with traffic.stopped():
                order.append("replaced")

        async def later() -> None:
            await traffic.open()
            order.append("later began")

        running = traffic.start(first())
        replacing = asyncio.ensure_future(replace())
        await stopping.wait()
        waiting = asyncio.ensure_future(later())
        gate.set()
        await asyncio.gather(running, replacing, waiting)
        return order

    assert asyncio.run(scenario()) == ["first ended", "replaced", "later began"]


def test_work_cancelled_before_it_ran_does_not_count() -> None:
    async def scenario() -> bool:
        traffic = Traffic()
        task = traffic.start(asyncio.sleep(3600))
        task.cancel()
        async with asyncio.timeout(5), traffic.stopped():
            return task.cancelled()

    assert asyncio.run(scenario())


def test_failed_work_and_a_failed_replacement_leave_it_open() -> None:
    async def fail() -> None:
        raise ValueError("work")

    async def scenario() -> None:
        traffic = Traffic()
        with pytest.raises(ValueError, match="work"):
            await traffic.start(fail())
        with pytest.raises(KeyError):
            async with asyncio.timeout(5), traffic.stopped():
                raise KeyError
        async with asyncio.timeout(5):
            await traffic.open()

    asyncio.run(scenario())


def test_a_stop_right_after_another_is_waited_for() -> None:
    """A request woken by the first replacement's end must not slip in before the second one."""

    async def scenario() -> list[str]:
        order: list[str] = []
        traffic, gate = Traffic(), asyncio.Event()

        async def request() -> None:
            await traffic.open()
            order.append("request")

        async def replacements() -> None:
            async with traffic.stopped():
                await gate.wait()
            async with traffic.stopped():
                order.append("second")

        replacing = asyncio.ensure_future(replacements())
        waiting = asyncio.ensure_future(request())
        gate.set()
        await asyncio.gather(replacing, waiting)
        return order

    assert asyncio.run(scenario()) == ["second", "request"]
