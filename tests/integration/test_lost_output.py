"""A run whose output nobody reads, or that cannot print what it has to say, trains all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import make_project, metrics

COMMAND = [sys.executable, "-m", "axolotl.cli.main", "train", "config.yaml"]
DEADLINE_S = 300

LOUD_REWARDS = """
calls = []

def loud(completions, **kwargs):
    print("für \\udcff")
    calls.append(1)
    if len(calls) == 2:
        raise ValueError("für alle")
    return [float(len(c[0]["content"])) for c in completions]
"""


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    make_project(tmp_path, tiny_model)
    return tmp_path


def test_a_reader_that_goes_away_after_one_line(project: Path) -> None:
    """`axolotl train config.yaml 2>&1 | head -1`"""
    process = subprocess.Popen(COMMAND, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert [entry["step"] for entry in metrics(project / "out")] == [1, 2]
    assert (project / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("streams", [">&- 2>&-", ">/dev/full 2>&1"])
def test_a_run_that_can_print_nothing_leaves_its_error_as_a_file(streams: str, project: Path) -> None:
    (project / "loud_rewards.py").write_text(LOUD_REWARDS)
    line = f'"$@" {streams}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, "--trl.reward_funcs=[loud_rewards.loud]"], cwd=project, timeout=DEADLINE_S
    )
    assert done.returncode == 5
    assert [entry["step"] for entry in metrics(project / "out")] == [1]
    written = json.loads((project / "out" / "last_error.json").read_text())
    assert written["exit_code"] == 5 and "für alle" in json.dumps(written, ensure_ascii=False)


def test_an_encoding_without_the_letters_of_an_error(project: Path) -> None:
    (project / "loud_rewards.py").write_text(LOUD_REWARDS)
    (project / "config.yaml").rename(project / "für.yaml")
    done = subprocess.run(
        [*COMMAND[:-1], "für.yaml", "--trl.reward_funcs=[loud_rewards.loud]"],
        cwd=project,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 5, done.stderr
    assert "ERROR E-RWD" in done.stderr and "f\\xfcr alle" in done.stderr and "UnicodeEncodeError" not in done.stderr
