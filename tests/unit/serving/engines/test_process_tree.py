from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker

import psutil
import pytest

from axolotl.serving.engines import process_tree

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
POLITE = "import time; print('up', flush=True); time.sleep(600)"


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_children_are_those_started_since_and_not_the_resource_tracker() -> None:
    before = process_tree.children()
    resource_tracker.ensure_running()
    process = start(POLITE)
    try:
        assert {child.pid for child in process_tree.children() - before} == {process.pid}
    finally:
        end(process)


def test_what_processes_compute_is_seen_and_what_has_ended_counts_nothing() -> None:
    this = psutil.Process()
    before = process_tree.cpu_seconds({this})
    while process_tree.cpu_seconds({this}) == before:
        pass
    ended = start(POLITE)
    known = psutil.Process(ended.pid)
    end(ended)
    assert process_tree.cpu_seconds({known}) == 0


def test_stopping_ends_the_polite_and_the_deaf_and_nobody_else() -> None:
    polite, deaf, bystander = start(POLITE), start(DEAF), start(POLITE)
    try:
        process_tree.stop({psutil.Process(polite.pid), psutil.Process(deaf.pid)}, grace_s=0.3)
        assert polite.wait(5) is not None and deaf.wait(5) is not None
        assert bystander.poll() is None
    finally:
        for process in (polite, deaf, bystander):
            end(process)


def test_stopping_what_is_gone_is_no_error() -> None:
    process = start(POLITE)
    handle = psutil.Process(process.pid)
    end(process)
    process_tree.stop({handle}, grace_s=0.1)
    process_tree.stop(set(), grace_s=0.1)


@pytest.fixture
def pair() -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    processes = start(POLITE), start(POLITE)
    try:
        yield processes
    finally:
        for process in processes:
            end(process)


@pytest.mark.skipif(sys.platform != "linux", reason="process descriptors are Linux's")
def test_the_end_of_a_process_is_noticed(pair: tuple[subprocess.Popen[str], subprocess.Popen[str]]) -> None:
    handles = [psutil.Process(process.pid) for process in pair]

    async def watch() -> psutil.Process:
        watching = asyncio.ensure_future(process_tree.first_exit(handles))
        await asyncio.wait({watching}, timeout=0)
        pair[1].kill()
        return await asyncio.wait_for(watching, 10)

    assert asyncio.run(watch()) == handles[1]
    assert process_tree.name(handles[0]) != "a process"


@pytest.mark.skipif(sys.platform != "linux", reason="process descriptors are Linux's")
def test_a_process_that_ended_before_counts_reaped_or_not(
    pair: tuple[subprocess.Popen[str], subprocess.Popen[str]],
) -> None:
    handle = psutil.Process(pair[0].pid)
    pair[0].kill()

    async def watch() -> psutil.Process:
        return await asyncio.wait_for(process_tree.first_exit([handle]), 10)

    assert asyncio.run(watch()) == handle
    assert not process_tree.is_alive(handle) and process_tree.is_alive(psutil.Process(pair[1].pid))
    pair[0].wait()
    assert not process_tree.is_alive(handle)
    assert asyncio.run(watch()) == handle
    assert process_tree.name(handle) == "a process"


@pytest.mark.skipif(sys.platform != "linux", reason="process descriptors are Linux's")
def test_watching_leaves_no_descriptor_open(pair: tuple[subprocess.Popen[str], subprocess.Popen[str]]) -> None:
    async def watch() -> tuple[int, int]:
        own = psutil.Process()
        before = own.num_fds()
        watching = asyncio.ensure_future(process_tree.first_exit([psutil.Process(process.pid) for process in pair]))
        await asyncio.wait({watching}, timeout=0)
        watching.cancel()
        await asyncio.wait({watching})
        return before, own.num_fds()

    before, after = asyncio.run(watch())
    assert before == after
