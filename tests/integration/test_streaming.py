"""Streaming, skipping and prefetching change when things happen, never what is learnt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.protocols import DataProducer
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer
from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer
from tests.support.recorded import (
    GROUP_SIZE,
    MAX_COMPLETION,
    PROMPTS,
    Recording,
    arguments,
    lora,
    our_trainer,
    record,
    tiny_policy,
)

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
ROWS = len(PROMPTS) * GROUP_SIZE
STREAMING = {
    "groups_per_chunk": 1,
    "trains_early": True,
    "rows_per_step": ROWS,
    "token_estimate": ROWS * MAX_COMPLETION / 2,
}


def background(depth: int) -> Callable[[GroupMaker], DataProducer]:
    return lambda maker: BackgroundProducer(maker.make, depth=depth)


def trained(
    directory: Path,
    tiny_model: Path,
    recording: Recording,
    *,
    step: dict[str, Any] | None = None,
    make_producer: Callable[[GroupMaker], DataProducer] = SyncProducer,
    **overrides: Any,
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights after three steps of three groups each, and what was logged."""
    torch.manual_seed(7)
    model, tokenizer = tiny_policy(tiny_model)
    # Plain descent: Adam would turn a rounding of a gradient near zero into a whole step.
    settings = {"optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": ROWS, "beta": 0.0, **overrides}
    args = arguments(directory, gradient_accumulation_steps=1, **settings)
    trainer = our_trainer(
        model,
        tokenizer,
        args,
        recording,
        micro_batch_size=4,
        importance=ImportanceSpec("token_truncate", cap=3.0),
        prompts_per_step=len(PROMPTS),
        peft_config=lora(),
        step=step,
        make_producer=make_producer,
    )
    trainer.train()
    trainer.pipeline.close()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return weights, [entry for entry in trainer.state.log_history if "loss" in entry]


def require_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


def without_signal(recording: Recording, prompts: set[int]) -> Recording:
    """The rewards of these prompts are all the same."""
    rewards = [[[0.7]] * GROUP_SIZE if p in prompts else group for p, group in enumerate(recording.rewards)]
    return Recording(recording.ids, recording.logps, rewards)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_streaming_learns_what_the_whole_batch_teaches(tmp_path: Path, tiny_model: Path, loss_type: str) -> None:
    recording = record(eos=2)
    whole, logged = trained(tmp_path / "whole", tiny_model, recording, loss_type=loss_type)
    streamed, stream_logged = trained(
        tmp_path / "streamed",
        tiny_model,
        recording,
        step=STREAMING,
        make_producer=background(0),
        loss_type=loss_type,
    )
    require_equal(streamed, whole)
    for ours, theirs in zip(stream_logged, logged, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["reward"] == theirs["reward"]
        assert ours["staleness/max"] == 0


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "cispo"])
@pytest.mark.parametrize("silent", [{1, 2}, {0, 1, 2}])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_skipping_changes_no_gradient(
    tmp_path: Path, tiny_model: Path, loss_type: str, silent: set[int], is_streaming: bool
) -> None:
    recording = without_signal(record(eos=2), silent)
    step = {**(STREAMING if is_streaming else {}), "skips_zero_signal": True}
    every, _ = trained(tmp_path / "every", tiny_model, recording, loss_type=loss_type)
    some, logged = trained(tmp_path / "some", tiny_model, recording, step=step, loss_type=loss_type)
    require_equal(some, every)
    per_group = GROUP_SIZE // 4
    assert [entry["skipped_zero_adv_batches"] for entry in logged] == [len(silent) * per_group] * 3


@pytest.mark.parametrize(("depth", "ages"), [(1, [0, 1, 1]), (2, [0, 1, 2])])
def test_prefetching_makes_what_was_ordered(tmp_path: Path, tiny_model: Path, depth: int, ages: list[int]) -> None:
    """Recorded completions do not depend on the policy, so only the staleness tells the runs apart."""
    recording = record(eos=2)
    in_turn, _ = trained(tmp_path / "in-turn", tiny_model, recording)
    ahead, logged = trained(tmp_path / "ahead", tiny_model, recording, make_producer=background(depth))
    require_equal(ahead, in_turn)
    assert [entry["staleness/max"] for entry in logged] == ages
