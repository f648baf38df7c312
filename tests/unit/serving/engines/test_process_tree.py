from __future__ import annotations

import subprocess
import sys
from multiprocessing import resource_tracker

import psutil

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
