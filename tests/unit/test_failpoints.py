"""Failpoints: what is written is what happens, where it is said and nowhere else."""

from __future__ import annotations

import ast
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from axolotl import failpoints
from axolotl.cli import train
from axolotl.cli.config import LoadedConfig
from axolotl.errors import EnvironmentFault
from axolotl.failpoints import POINTS, VARIABLE, arm, parse, point

SOURCE = Path(__file__).resolve().parents[2] / "src" / "axolotl"


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm({})


def armed(text: str) -> None:
    arm({VARIABLE: text})


def placed() -> list[str]:
    """The argument of every call of `point` in the package."""
    names = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called == "point":
                (name,) = node.args
                assert isinstance(name, ast.Constant) and isinstance(name.value, str), file
                names.append(name.value)
    return names


def test_every_point_of_the_list_has_a_place_and_no_other_is_passed() -> None:
    assert set(placed()) == POINTS


def test_nothing_happens_unless_the_variable_is_set() -> None:
    arm({})
    for name in POINTS:
        point(name)


def test_an_errno_is_raised_at_its_point_only() -> None:
    armed("sync.after_files=raise:ENOSPC")
    point("sync.before_rename")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as raised:
            point("sync.after_files")
        assert raised.value.errno == errno.ENOSPC


def test_a_count_picks_one_passing() -> None:
    armed("rwd.sent=raise:RuntimeError@3")
    point("rwd.sent")
    point("rwd.sent")
    with pytest.raises(RuntimeError, match=VARIABLE):
        point("rwd.sent")
    point("rwd.sent")


def test_several_rules_for_one_point() -> None:
    armed("rwd.sent=raise:EIO@1; rwd.sent=raise:EDQUOT@2;")
    numbers = []
    for _ in range(2):
        with pytest.raises(OSError) as raised:
            point("rwd.sent")
        numbers.append(raised.value.errno)
    assert numbers == [errno.EIO, errno.EDQUOT]


def test_arming_again_starts_the_counts_again() -> None:
    armed("end=raise:EIO@2")
    point("end")
    armed("end=raise:EIO@2")
    point("end")
    with pytest.raises(OSError):
        point("end")


def test_a_delay_holds_up_one_thread_only() -> None:
    armed("rwd.sent=delay:60")
    stuck = threading.Thread(target=point, args=("rwd.sent",), daemon=True)
    stuck.start()
    # This thread gets here while the other one waits.
    assert stuck.is_alive()
    armed("rwd.sent=delay:0.02")
    before = time.monotonic()
    point("rwd.sent")
    assert time.monotonic() - before >= 0.02


def test_a_hang_stops_every_thread() -> None:
    armed("rwd.sent=hang:0.3")
    ticks: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        while not is_done.is_set():
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    before = time.monotonic()
    point("rwd.sent")
    is_done.set()
    thread.join(10)
    seconds = time.monotonic() - before
    assert seconds >= 0.3
    assert max(late - early for early, late in pairwise(ticks)) >= 0.29


def child(code: str) -> subprocess.CompletedProcess[str]:
    preamble = "from axolotl.failpoints import VARIABLE, arm, point\n"
    return subprocess.run(
        [sys.executable, "-c", preamble + code], capture_output=True, text=True, timeout=60, check=False
    )


def test_exit_ends_a_thread_without_a_word_and_a_process_through_its_clean_ups() -> None:
    done = child(
        "import threading\narm({VARIABLE: 'gen.received=exit'})\n"
        "thread = threading.Thread(target=lambda: print(point('gen.received')))\nthread.start()\nthread.join()\n"
        "print('alone', flush=True)\ntry:\n point('gen.received')\nfinally:\n print('cleaned up')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "alone\ncleaned up\n", "")


def test_kill_is_a_kill() -> None:
    done = child(
        "arm({VARIABLE: 'end=kill@2'})\ntry:\n point('end'); print('once', flush=True); point('end')\n"
        "finally:\n print('cleaned up')"
    )
    assert (done.returncode, done.stdout) == (-9, "once\n")


def test_no_signal_shortens_a_hang() -> None:
    done = child(
        "import os, signal, threading, time\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "arm({VARIABLE: 'end=hang:0.4'})\nbefore = time.monotonic()\npoint('end')\nprint(time.monotonic() - before)"
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sync.after_file=kill", "no point 'sync.after_file'"),
        ("=kill", "no point ''"),
        ("end", "'' is no action"),
        ("end=", "'' is no action"),
        ("end=die", "'die' is no action"),
        ("end=kill:9", "'kill:9' is no action"),
        ("end=exit:3", "'exit:3' is no action"),
        ("end=raise", "'raise' is no action"),
        ("end=raise:ENOTHING", "'raise:ENOTHING' is no action"),
        ("end=raise:errorcode", "'raise:errorcode' is no action"),
        ("end=hang", "'hang' is no action"),
        ("end=delay:soon", "'delay:soon' is no action"),
        ("end=delay:nan", "'delay:nan' is no action"),
        ("end=delay:-1", "'delay:-1' is no action"),
        ("end=kill@", "'kill@' is no action"),
        ("end=kill@0", "@0 is no count"),
        ("end=kill@two", "@two is no count"),
        ("rwd.sent=kill@2;end=boom", "'boom' is no action"),
    ],
)
def test_what_cannot_be_used_is_one_error(text: str, why: str) -> None:
    armed("rwd.sent=raise:EIO")
    with pytest.raises(EnvironmentFault, match=VARIABLE) as raised:
        armed(text)
    assert raised.value.code == "E-ENV-13"
    assert why in raised.value.why


def test_a_run_says_so_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sync.after_file=kill")
    with pytest.raises(EnvironmentFault) as raised:
        train.run(cast(LoadedConfig, None), train.TrainFlags())
    assert raised.value.code == "E-ENV-13"


def test_the_first_point_is_a_checked_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cfg.loaded=raise:RuntimeError")
    with pytest.raises(RuntimeError, match=VARIABLE):
        train.run(cast(LoadedConfig, None), train.TrainFlags())


def test_all_that_the_page_shows_can_be_written() -> None:
    rules = parse("ckpt.before_rename=kill@3;sync.after_files=raise:ENOSPC;rwd.sent=hang:5;gen.sent=delay:0.5;end=exit")
    assert {name: [rule.nth for rule in found] for name, found in rules.items()} == {
        "ckpt.before_rename": [3],
        "sync.after_files": [0],
        "rwd.sent": [0],
        "gen.sent": [0],
        "end": [0],
    }


def test_an_unarmed_point_costs_nothing_to_speak_of() -> None:
    arm({})
    assert not failpoints._armed
    count = 100_000
    before = time.perf_counter()
    for _ in range(count):
        point("rwd.sent")
    assert (time.perf_counter() - before) / count < 5e-6
