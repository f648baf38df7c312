"""Servers that die or hang in the middle of a run: managed ones are started again and nothing of the run changes;
unmanaged ones cost a pause, or a run that ends with a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from axolotl.serving.client import ServerClient
from axolotl.serving.server_file import ServerFile, read_server_file
from tests.campaigns import chaos
from tests.support.cli import run, running
from tests.support.disturbed import (
    MARK,
    Disturbed,
    assert_equal_runs,
    assert_nothing_left,
    batches,
    disturbed,
    disturbed_project,
    marked,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 5


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `STEPS` steps whose server nobody touched."""
    directory = tmp_path_factory.mktemp("undisturbed")
    disturbed_project(directory, tiny_model, STEPS)
    with disturbed(directory) as calm:
        assert calm.train.wait() == 0, calm.train.output
        assert "starting it again" not in calm.train.output
    assert len(batches(directory)) == STEPS
    prompts = [prompt for batch in batches(directory) for prompt, _ in batch[::4]]
    assert len(set(prompts)) == len(prompts), "an epoch takes each prompt once"
    return directory


@pytest.fixture(scope="module")
def other_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Another server on the machine; its sync directory."""
    directory = tmp_path_factory.mktemp("other")
    disturbed_project(directory, tiny_model, STEPS, is_managed=False)
    with running(directory, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after")
        yield directory / "sync"


def answers(sync_dir: Path) -> tuple[ServerFile, list[list[float]], int]:
    """Who the server there is, log-probs of its base model, and how much it has worked besides."""
    found = read_server_file(sync_dir)
    assert found is not None and found.is_alive()
    with ServerClient(found.url, sync_dir, 20) as client:
        client.wait_ready()
        before = client.progress().work
        return found, client.score([[5, 6, 7]], [[8, 9]], 1.0, 0), client.progress().work - before


@pytest.fixture
def bystander(other_server: Path) -> Iterator[Path]:
    """Another server on the machine, which must not notice anything of the test; its sync directory."""
    before = answers(other_server)
    yield other_server
    assert answers(other_server) == before


def kill_server(run: Disturbed) -> None:
    server = run.server()
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)


def stop_server(run: Disturbed) -> None:
    server = run.server()
    assert server is not None
    os.kill(server.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "said"), [(kill_server, r"ended \(SIGKILL\)"), (stop_server, r"ended \(it hung\)")], ids=["kill", "hang"]
)
@pytest.mark.usefixtures("bystander")
def test_a_server_lost_while_it_generates_changes_nothing(
    fault: Callable[[Disturbed], None], said: str, tiny_model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    disturbed_project(tmp_path, tiny_model, STEPS, trl__vllm_server_timeout=15)
    with disturbed(tmp_path) as run:
        run.wait_until(lambda: run.num_scored == 2 and run.is_generating(), "generation of step 3")
        fault(run)
        assert run.train.wait() == 0, run.train.output
        assert len(re.findall(said, run.train.output)) == 1, run.train.output
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.usefixtures("bystander")
def test_restarts_that_are_used_up_end_the_run_with_a_checkpoint(
    tiny_model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    disturbed_project(tmp_path, tiny_model, STEPS, vllm__max_restarts=1)
    with disturbed(tmp_path) as broken:
        broken.wait_until(lambda: broken.num_scored == 2 and broken.is_generating(), "generation of step 3")
        first = broken.server()
        kill_server(broken)
        broken.wait_until(lambda: broken.server() not in (None, first), "the server that was started again")
        kill_server(broken)
        assert broken.train.wait() == 6, broken.train.output
    assert "E-SRV-24" in broken.train.output and "Traceback" not in broken.train.output
    assert re.search(r"saved\s+\S*checkpoint-2,", broken.train.output), broken.train.output
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").exists()
    resumed = run(tmp_path, "train", "config.yaml", "--resume")
    assert resumed.code == 0, resumed.stderr
    assert_equal_runs(tmp_path, undisturbed)


def test_an_unmanaged_server_that_goes_away_ends_the_run_with_a_checkpoint_to_go_on_from(
    tiny_model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    disturbed_project(tmp_path, tiny_model, STEPS, is_managed=False, trl__vllm_server_timeout=5)
    with running(tmp_path, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after")
        with disturbed(tmp_path) as lost:
            lost.wait_until(lambda: lost.num_scored == 2 and lost.is_generating(), "generation of step 3")
            os.kill(server.process.pid, signal.SIGKILL)
            assert lost.train.wait() == 6, lost.train.output
        assert "E-SRV-04" in lost.train.output and "--resume" in lost.train.output
        assert re.search(r"saved\s+\S*checkpoint-2,", lost.train.output), lost.train.output
    with running(tmp_path, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after")
        resumed = run(tmp_path, "train", "config.yaml", "--resume")
        assert resumed.code == 0, resumed.stderr
    assert_equal_runs(tmp_path, undisturbed)


def test_an_unmanaged_server_that_comes_back_is_a_pause(tiny_model: Path, undisturbed: Path, tmp_path: Path) -> None:
    disturbed_project(tmp_path, tiny_model, STEPS, is_managed=False)
    with running(tmp_path, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after")
        with disturbed(tmp_path) as paused:
            paused.wait_until(lambda: paused.num_scored == 2 and paused.is_generating(), "generation of step 3")
            os.kill(server.process.pid, signal.SIGKILL)
            server.wait()
            with running(tmp_path, "vllm-serve", "config.yaml"):
                assert paused.train.wait() == 0, paused.train.output
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_wait_for_a_server_with_a_checkpoint(
    number: signal.Signals, code: int, tiny_model: Path, tmp_path: Path
) -> None:
    disturbed_project(tmp_path, tiny_model, STEPS, is_managed=False, trl__vllm_server_timeout=300)
    with running(tmp_path, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after")
        with disturbed(tmp_path) as stopped:
            stopped.wait_until(lambda: stopped.num_scored == 2 and stopped.is_generating(), "generation of step 3")
            os.kill(server.process.pid, signal.SIGSTOP)
            os.kill(stopped.train.process.pid, number)
            assert stopped.train.wait(30) == code, stopped.train.output
        assert re.search(r"saved\s+\S*checkpoint-2,", stopped.train.output), stopped.train.output
        assert "E-SIG-01" in stopped.train.output and "--resume" in stopped.train.output
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").exists()


@pytest.mark.usefixtures("bystander")
def test_a_run_that_ends_leaves_neither_processes_nor_files_of_its_server(tiny_model: Path, tmp_path: Path) -> None:
    disturbed_project(tmp_path, tiny_model, 1)
    with disturbed(tmp_path) as ending:
        assert ending.train.wait() == 0, ending.train.output
        assert_nothing_left(ending.mark)
    assert list((tmp_path / "sync").iterdir()) == []


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("stopped", ["nothing", "server", "launcher", "group"])
def test_a_trainer_that_is_killed_takes_its_server_along(stopped: str, tiny_model: Path, tmp_path: Path) -> None:
    disturbed_project(tmp_path, tiny_model, STEPS)
    with disturbed(tmp_path) as killed:
        killed.wait_until(lambda: killed.num_scored == 2 and killed.is_generating(), "generation of step 3")
        server = killed.server()
        assert server is not None
        group = os.getpgid(server.pid)
        if stopped == "group":
            os.killpg(group, signal.SIGSTOP)
        elif stopped != "nothing":
            os.kill(server.pid if stopped == "server" else group, signal.SIGSTOP)
        killed.train.process.send_signal(signal.SIGKILL)
        killed.train.process.wait(10)
        assert_nothing_left(killed.mark)


def test_vllm_stop_ends_one_server_and_leaves_the_other(tiny_model: Path, bystander: Path, tmp_path: Path) -> None:
    disturbed_project(tmp_path, tiny_model, STEPS, is_managed=False)
    with running(tmp_path, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after")
        stopped = run(tmp_path, "vllm-stop", "config.yaml")
        assert stopped.code == 0 and f"(pid {server.process.pid}" in stopped.stdout, stopped.stderr
        assert server.wait(10) == 0
    again = run(tmp_path, "vllm-stop", "config.yaml")
    assert again.code == 3 and "E-ENV-10" in again.stderr
    other = read_server_file(bystander)
    assert other is not None and other.is_alive()


def test_vllm_stop_says_whose_a_managed_server_is(tiny_model: Path, undisturbed: Path, tmp_path: Path) -> None:
    disturbed_project(tmp_path, tiny_model, STEPS)
    with disturbed(tmp_path) as stopped:
        stopped.wait_until(lambda: stopped.num_scored == 1, "step 1")
        done = run(tmp_path, "vllm-stop", "config.yaml")
        assert f"the training run with pid {stopped.train.process.pid}" in done.stdout, done.stderr
        assert stopped.train.wait() == 0, stopped.train.output
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.timeout(600)
def test_a_short_chaos(tiny_model: Path, tmp_path: Path) -> None:
    result = chaos.survive("transformers", 3, seed=1, directory=tmp_path, model=tiny_model)
    assert (result.survived, result.faults) == (3, 3), result.report


def test_the_processes_of_a_run_are_found_by_their_mark(tmp_path: Path) -> None:
    """What says that nothing is left must be able to see something."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={MARK: "m-1"}) as process:
        assert wait_until(lambda: marked("m-1"), "the process") == [psutil.Process(process.pid)]
        process.communicate(b"\n")
    assert marked("m-1") == []
