"""Failed prompts in the requests that a server gets, through the whole trainer, with the orders worked by hand.

Six prompts, two a step, in order, so that an epoch is `01 23 45`; two epochs. A digit is the prompt's row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from axolotl.cli.config import config_from_mapping
from axolotl.core.trainers.grpo import assembly
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.distributed import World
from axolotl.core.trainers.grpo.protocols import DataProducer
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer
from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.rollout.planning import Reroll
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.types import RewardRequest, RewardResult
from tests.fakes.server import scripted_server
from tests.support.recorded import arguments, tiny_policy
from tests.support.served import claimed, served_trainer

PROMPTS = [(10 + row, 40, 50 + row) for row in range(6)]
GROUP_SIZE, TOKENS = 2, 3
STREAMING = {"groups_per_chunk": 1, "trains_early": True, "rows_per_step": 4, "token_estimate": 6.0}


@dataclass(frozen=True)
class SomeFail:
    """Every completion of these rows gets -1, as much as the threshold; the others 0 and 1 in turn."""

    rows: frozenset[int]
    names: tuple[str, ...] = ("some",)

    def score(self, request: RewardRequest) -> RewardResult:
        rows = request.columns["row"]
        values = [-1.0 if row in self.rows else float(index % 2) for index, row in enumerate(rows)]
        return RewardResult(torch.tensor(values).unsqueeze(1), {}, {})

    def close(self) -> None: ...


def background(depth: int) -> Callable[[GroupMaker], DataProducer]:
    return lambda maker: BackgroundProducer(maker.make, depth=depth, close_backend=maker.backend.close)


def reroll(**options: Any) -> Callable[[int], Reroll | None]:
    """As a run of a config with these options makes it."""
    config = config_from_mapping(
        {
            "base_model": "m",
            "rl": "grpo",
            "datasets": [{"path": "a"}],
            "micro_batch_size": 4,
            "trl": {"reward_funcs": ["r.f"], "num_generations": GROUP_SIZE, "reroll_threshold": -1.0, **options},
        }
    )
    return lambda num_steps: assembly._reroll(config, num_steps, World())


def requested(
    directory: Path,
    tiny_model: Path,
    *,
    length: dict[str, Any],
    make_producer: Callable[[GroupMaker], DataProducer] = SyncProducer,
    step: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of each request to generate, the requests, and what was logged; rows 0, 2 and 3 fail always."""
    torch.manual_seed(7)
    model, tokenizer = tiny_policy(tiny_model)
    args = arguments(
        directory / "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=TOKENS,
        loss_type="dapo",
        beta=0.0,
        **length,
    )
    with scripted_server() as server, claimed(server.url, directory) as client:
        trainer = served_trainer(
            model,
            tokenizer,
            args,
            client,
            directory,
            prompts=PROMPTS,
            spec=StepSpec(4, "dapo", **(step or {})),
            prompts_per_step=2,
            make_producer=make_producer,
            rewards=SomeFail(frozenset({0, 2, 3})),
            reroll=reroll(**options),
            importance=ImportanceSpec("token_truncate", cap=3.0),
        )
        trainer.train()
        trainer.pipeline.close()
        bodies = server.bodies("/generate/")
    rows = ["".join(str(prompt[0] - 10) for prompt in body["prompts"]) for body in bodies]
    return rows, bodies, [entry for entry in trainer.state.log_history if "loss" in entry]


MODES: dict[str, dict[str, Any]] = {
    "in turn": {},
    "streaming": {"make_producer": background(0), "step": STREAMING},
    "ahead": {"make_producer": background(1)},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    "length", [{"max_steps": 6}, {"max_steps": -1, "num_train_epochs": 2}], ids=["max_steps", "num_epochs"]
)
def test_after_the_start_fraction_failed_prompts_are_asked_for_again(
    tmp_path: Path, tiny_model: Path, mode: dict[str, Any], length: dict[str, Any]
) -> None:
    """From the fourth of six steps on, one in a request, in the place of its last fresh prompt.

    waiting    fresh   request                   waiting afterwards: 0 and 2 fail again, no prompt waits twice
    0 2 3      01      02: 0 is there anyway     0 3 2
    0 3 2      23      20: 0 waits longest       3 2 0
    3 2 0      45      43                        2 0 3
    """
    rows, bodies, logged = requested(
        tmp_path, tiny_model, length=length, **mode, reroll_start_fraction=0.5, reroll_max_groups=1
    )
    assert rows == ["01", "23", "45", "02", "20", "43"]
    assert [entry["reroll/groups"] for entry in logged] == [0, 0, 0, 1, 1, 1]
    assert logged[-1]["reroll/size"] == 3 and logged[-1]["reroll/dropped"] == 0
    # The same prompt in the same epoch, and yet other completions: row 2 is tried again, then it is fresh.
    assert bodies[3]["prompts"][1] == bodies[4]["prompts"][0]
    assert not {*bodies[3]["seeds"][1]} & {*bodies[4]["seeds"][0]}


def test_up_to_so_many_in_a_request(tmp_path: Path, tiny_model: Path) -> None:
    """Two: 0 2 3 wait for the request of 01, which is 23; then 0 waits alone, since 2 and 3 fail anew: 0 2 3. They are
    fresh in the next one, so that 0 comes alone; its failure, and 2's, leave 2 3 0 for 45."""
    rows, bodies, logged = requested(
        tmp_path, tiny_model, length={"max_steps": 6}, reroll_start_fraction=0.5, reroll_max_groups=2
    )
    assert rows == ["01", "23", "45", "23", "20", "23"]
    assert [entry["reroll/groups"] for entry in logged] == [0, 0, 0, 2, 1, 2]
    # Row 2 three times in the second epoch: no seed comes twice.
    seeds = [*bodies[3]["seeds"][0], *bodies[4]["seeds"][0], *bodies[5]["seeds"][0]]
    assert len(seeds) == 3 * GROUP_SIZE == len({*seeds})


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("in turn", ["01", "20", "40", "02", "20", "42"]),
        # What a step taught is known one request later.
        ("ahead", ["01", "23", "40", "02", "20", "43"]),
    ],
)
def test_from_the_start_a_failure_comes_back_with_the_next_request_that_is_not_made_yet(
    tmp_path: Path, tiny_model: Path, mode: str, expected: list[str]
) -> None:
    """In turn: 0 fails, comes with 23, fails, comes with 45; 2 has failed in between, and comes with 01, and so on."""
    rows, _, _ = requested(
        tmp_path, tiny_model, length={"max_steps": 6}, **MODES[mode], reroll_start_fraction=0.0, reroll_max_groups=1
    )
    assert rows == expected


def test_at_fraction_one_no_prompt_comes_again(tmp_path: Path, tiny_model: Path) -> None:
    rows, _, logged = requested(tmp_path, tiny_model, length={"max_steps": 6}, reroll_start_fraction=1.0)
    assert rows == ["01", "23", "45"] * 2
    assert "reroll/size" not in logged[0]
