"""What is learnt depends on which policy version made what, and on nothing else: not on when it was made, or where.

The server's tokens follow from seed and version, so a run that was given another version learns something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.protocols import DataProducer
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer
from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from tests.fakes.server import scripted_server
from tests.support.recorded import arguments, tiny_policy
from tests.support.served import InTurn, claimed, served_trainer

PROMPTS = [(10 + place, 40, 50 + place) for place in range(8)]
GROUPS, GROUP_SIZE, TOKENS, STEPS = 4, 4, 6, 6
ROWS = GROUPS * GROUP_SIZE
STREAMING = {"groups_per_chunk": 1, "trains_early": True, "rows_per_step": ROWS, "token_estimate": ROWS * TOKENS / 2}

Producer = Callable[[GroupMaker], DataProducer]


def background(depth: int) -> Producer:
    return lambda maker: BackgroundProducer(maker.make, depth=depth, close_backend=maker.backend.close)


def trained(
    directory: Path, tiny_model: Path, make_producer: Producer, *, loss_type: str = "dapo", **step: Any
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights after six steps, and the version that each step was ordered from."""
    torch.manual_seed(7)
    model, tokenizer = tiny_policy(tiny_model)
    args = arguments(
        directory / "out",
        # Plain descent: Adam would turn a rounding of a gradient near zero into a whole step.
        optim="sgd",
        learning_rate=0.1,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=TOKENS,
        max_steps=STEPS,
        loss_type=loss_type,
        beta=0.0,
    )
    with scripted_server() as server, claimed(server.url, directory) as client:
        trainer = served_trainer(
            model,
            tokenizer,
            args,
            client,
            directory,
            prompts=PROMPTS,
            spec=StepSpec(GROUP_SIZE, loss_type, **step),
            prompts_per_step=GROUPS,
            make_producer=make_producer,
            importance=ImportanceSpec("token_truncate", cap=3.0),
        )
        trainer.train()
        trainer.pipeline.close()
        return weights(trainer), [body["adapter_version"] for body in server.bodies("/generate/")]


def weights(trainer: AxolotlGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def in_turn(versions: Sequence[int]) -> Producer:
    return partial(InTurn, versions=versions)


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("depth", "interval", "step", "versions"),
    [
        (0, 1, {}, [1, 2, 3, 4, 5, 6]),
        (0, 1, STREAMING, [1, 2, 3, 4, 5, 6]),
        (0, 2, {}, [1, 1, 3, 3, 5, 5]),
        (0, 2, STREAMING, [1, 1, 3, 3, 5, 5]),
        (1, 1, {}, [1, 1, 2, 3, 4, 5]),
        (1, 1, STREAMING, [1, 1, 2, 3, 4, 5]),
        (1, 2, {}, [1, 1, 1, 3, 3, 5]),
    ],
    ids=[
        "in turn",
        "streaming",
        "interval 2",
        "interval 2, streaming",
        "ahead",
        "ahead, streaming",
        "ahead, interval 2",
    ],
)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_same_versions_teach_the_same(
    tmp_path: Path,
    tiny_model: Path,
    loss_type: str,
    depth: int,
    interval: int,
    step: dict[str, Any],
    versions: list[int],
) -> None:
    both: dict[str, Any] = {"loss_type": loss_type, "sync_interval": interval}
    expected, _ = trained(tmp_path / "turn", tiny_model, in_turn(versions), **both)
    ours, ordered = trained(tmp_path / "ours", tiny_model, background(depth), **both, **step)
    assert ordered == versions
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_another_version_teaches_something_else(tmp_path: Path, tiny_model: Path) -> None:
    """Otherwise the test above could not fail."""
    newest, _ = trained(tmp_path / "newest", tiny_model, in_turn([1, 2, 3, 4, 5, 6]))
    last_differs, _ = trained(tmp_path / "older", tiny_model, in_turn([1, 2, 3, 4, 5, 5]))
    assert distance(newest, last_differs) > 1e-4
