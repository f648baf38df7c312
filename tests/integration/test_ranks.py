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
from tests.support.rank_runs import CASES, STEPS, Trained, trained

# What two ranks log as one does.
TOLD = {"loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "num_tokens"}
TOLD_OF = ("ledger/", "completions/", "staleness/", "rewards/")

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


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
        done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=500)
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
    told = two_ranks.result(name, 0).log
    for step, entry in enumerate(expected.log):
        # Where nothing has signal each rank runs a row of its own, so that there are gradients.
        told_of = TOLD_OF if name == "skip everything" else (*TOLD_OF, "sampling/")
        numbers = {key: value for key, value in entry.items() if key in TOLD or key.startswith(told_of)}
        assert {key: told[step][key] for key in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6), step


def test_what_is_learnt_depends_on_the_loss_and_on_every_prompt(two_ranks: TwoRanks) -> None:
    """Otherwise the test above could not fail."""
    plain = two_ranks.result("grpo", 0).weights
    for other in ("bnpo", "luspo", "skip grpo", "interval"):
        weights = two_ranks.result(other, 0).weights
        assert max(float((plain[key] - value).abs().max()) for key, value in weights.items()) > 1e-4, other


def test_groups_without_signal_are_skipped_where_no_rank_needs_the_forward_pass(two_ranks: TwoRanks) -> None:
    """Of 8 completions a rank, 3 at once: the ranks have 0 and 8 rows with signal, then 8 and 4, and so again."""
    skipped = [entry["skipped_zero_adv_batches"] for entry in two_ranks.result("skip grpo", 0).log]
    assert skipped == [0, 0, 0, 0]
    everything = [entry["skipped_zero_adv_batches"] for entry in two_ranks.result("skip everything", 0).log]
    assert everything == [2, 2, 2, 2]


def test_the_server_is_claimed_once_and_gets_every_version_once(two_ranks: TwoRanks) -> None:
    claims = [body["action"] for body in two_ranks.server.bodies("/session/")]
    assert claims == ["claim", "release"] * len(CASES)
    pushed = [body["version"] for body in two_ranks.server.bodies("/set_lora_adapter/")]
    num_rollouts = {name: STEPS // case.step.get("sync_interval", 1) for name, case in CASES.items()}
    assert len(pushed) == sum(num_rollouts.values()) - num_rollouts["slices"] + 1


def test_each_rank_asks_for_its_own_prompts(two_ranks: TwoRanks) -> None:
    asked = [[prompt[0] - 10 for prompt in body["prompts"]] for body in two_ranks.server.bodies("/generate/")]
    assert asked and all(rows in ([0, 1], [2, 3], [4, 5], [6, 7], [0, 1, 4, 5], [2, 3, 6, 7]) for rows in asked)
    assert len({tuple(rows) for rows in asked}) == 6
