"""Two ranks that train together learn what one learns from all of their prompts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from axolotl.core.trainers.grpo.distributed import World
from tests.fakes.server import ScriptedServer, scripted_server
from tests.support.cli import REPO, environment
from tests.support.rank_runs import CASES, Trained, trained

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class TwoRanks:
    """What the ranks have written, and what they asked the server for."""

    directory: Path
    server: ScriptedServer

    def result(self, name: str, rank: int) -> Trained:
        return Trained(*torch.load(self.directory / f"{name}.{rank}.pt"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[TwoRanks]:
    """Every case, in one start of two processes."""
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "sync").mkdir()
    with scripted_server() as server:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "tests.support.rank_runs", server.url, str(tiny_model), str(directory)]
        done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        yield TwoRanks(directory, server)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_learns_from_the_union(
    name: str, two_ranks: TwoRanks, tiny_model: Path, tmp_path: Path
) -> None:
    with scripted_server() as server:
        expected = trained(CASES[name], World(), server.url, tiny_model, tmp_path)
    for rank in (0, 1):
        ours = two_ranks.result(name, rank)
        for key, value in expected.weights.items():
            torch.testing.assert_close(ours.weights[key], value, rtol=1e-5, atol=1e-6, msg=f"{key} on rank {rank}")
