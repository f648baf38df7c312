"""Replay and re-roll through the whole trainer, with numbers that can be worked out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.replaying import Replay
from axolotl.core.trainers.grpo.rollout.planning import Reroll
from axolotl.core.trainers.grpo.rollout.replay import ReplayBuffer, ReplaySpec
from axolotl.core.trainers.grpo.rollout.reroll import RerollQueue, RerollSpec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.core.trainers.grpo.types import Order
from tests.support.recorded import GROUP_SIZE, Recording, arguments, lora, our_trainer, record, tiny_policy


def make_trainer(directory: Path, tiny_model: Path, recording: Recording, **parts: Any) -> AxolotlGRPOTrainer:
    """One prompt a step, three steps."""
    torch.manual_seed(7)
    model, tokenizer = tiny_policy(tiny_model)
    args = arguments(
        directory,
        optim="sgd",
        learning_rate=0.1,
        per_device_train_batch_size=GROUP_SIZE,
        gradient_accumulation_steps=1,
        beta=0.0,
        loss_type="grpo",
    )
    return our_trainer(
        model,
        tokenizer,
        args,
        recording,
        micro_batch_size=GROUP_SIZE,
        importance=ImportanceSpec("token_truncate", cap=3.0),
        peft_config=lora(),
        **parts,
    )


def buffer(recomputes: bool) -> Any:
    return lambda spec: Replay(ReplayBuffer(ReplaySpec(10, 16, seed=0)), spec, recomputes)


def with_rewards(recording: Recording, *rewards: list[float]) -> Recording:
    return Recording(recording.ids, recording.logps, [[[value] for value in group] for group in rewards])


def weights(trainer: AxolotlGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


SPREAD = [0.0, 1.0] * (GROUP_SIZE // 2)
SAME = [0.5] * GROUP_SIZE


def test_a_group_without_signal_is_replaced_by_the_one_that_is_kept(tmp_path: Path, tiny_model: Path) -> None:
    """Prompt 0 teaches, prompts 1 and 2 do not: the run is the one that trains on prompt 0 three times."""
    recording = record(eos=2)
    silent = with_rewards(recording, SPREAD, SAME, SAME)
    replayed = make_trainer(tmp_path / "replayed", tiny_model, silent, replay=buffer(True))
    replayed.train()
    thrice = Recording(recording.ids[:1] * 3, recording.logps[:1] * 3, [[[value] for value in SPREAD]] * 3)
    plain = make_trainer(tmp_path / "plain", tiny_model, thrice)
    # The same prompt in all three places.
    rows = plain.pipeline.producer._maker.rows  # type: ignore[attr-defined]
    for index in (1, 2):
        object.__setattr__(rows[index], "ids", rows[0].ids)
    plain.train()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(replayed)[name], value, rtol=1e-5, atol=1e-7, msg=name)
    logged = [entry for entry in replayed.state.log_history if "loss" in entry]
    assert [entry["replay/replaced"] for entry in logged] == [0, 1, 1]
    assert [entry.get("replay/age_max") for entry in logged] == [None, 1, 2]
    # Rewards are those of the prompts that were drawn, not of what stood in for them.
    assert [entry["reward"] for entry in logged] == pytest.approx([0.5, 0.5, 0.5])
    assert [entry["reward_std"] for entry in logged][1:] == [0, 0]


def test_stored_log_probs_change_weights_and_ratios_as_worked_out(tmp_path: Path, tiny_model: Path) -> None:
    """With q the sampler, s the policy that first trained the group and p the present one, a replayed token has weight
    min(s/q, 3) and ratio p/s; scored again, it has min(p/q, 3) and 1."""
    recording = with_rewards(record(eos=2), SPREAD, SAME, SAME)
    seen: dict[bool, list[dict[str, torch.Tensor]]] = {}
    for recomputes in (True, False):
        trainer = make_trainer(tmp_path / str(recomputes), tiny_model, recording, replay=buffer(recomputes))
        given: list[dict[str, torch.Tensor]] = []
        seen[recomputes] = given
        original = trainer._get_per_token_logps_and_entropies

        def loss(model: Any, inputs: Any, given: Any = given, trainer: Any = trainer, original: Any = original) -> Any:
            given.append({**inputs, "p": original()[0].detach()})
            return GRPOTrainer._compute_loss(trainer, model, inputs)

        trainer._compute_loss = loss  # type: ignore[method-assign]
        trainer.train()
    again, stored = seen[True], seen[False]
    first = stored[0]["p"]
    for step in (1, 2):
        mask = stored[step]["completion_mask"].bool()
        q = stored[step]["sampling_per_token_logps"]
        assert torch.equal(q, stored[0]["sampling_per_token_logps"])
        torch.testing.assert_close(stored[step]["old_per_token_logps"][mask], first[mask])
        weight = (first - q).exp().clamp(max=3.0)
        torch.testing.assert_close(stored[step]["importance_sampling_ratio"][mask], weight[mask])
        assert "old_per_token_logps" not in again[step]
        weight = (again[step]["p"] - q).exp().clamp(max=3.0)
        torch.testing.assert_close(again[step]["importance_sampling_ratio"][mask], weight[mask])
        assert not torch.allclose(again[step]["p"][mask], first[mask])


def test_of_a_step_that_is_skipped_nothing_is_kept_for_replay(tmp_path: Path, tiny_model: Path) -> None:
    """The rewards of prompt 1 are too large for their sum; prompt 0 stands in for prompt 2, and is all that is kept."""
    recording = with_rewards(record(eos=2), SPREAD, [0.0, 3e38] * (GROUP_SIZE // 2), SAME)
    trainer = make_trainer(tmp_path, tiny_model, recording, replay=buffer(True))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["ledger/failed"] for entry in logged] == [0, GROUP_SIZE, 0]
    assert [entry["replay/size"] for entry in logged] == [1, 1, 1]
    assert [entry["replay/replaced"] for entry in logged] == [0, 0, 1]
    assert trainer.pipeline.books.ledger.counts.total == 4 * GROUP_SIZE


def test_a_failed_prompt_comes_back_with_other_seeds(tmp_path: Path, tiny_model: Path) -> None:
    """Prompt 0 fails in step 0; from step 2 on failed prompts are tried again, in the place of prompt 2."""
    recording = with_rewards(record(eos=2), [0.0] * GROUP_SIZE, SPREAD, SPREAD)
    reroll = Reroll(RerollQueue(RerollSpec(capacity=4, start_step=2)), max_groups=1, threshold=0.0)
    trainer = make_trainer(tmp_path, tiny_model, recording, reroll=reroll)
    orders: list[Order] = []
    place = trainer.pipeline.producer.place
    object.__setattr__(trainer.pipeline.producer, "place", lambda order: (orders.append(order), place(order))[1])
    trainer.train()
    assert [[(slot.row, slot.reroll) for slot in order.slots] for order in orders] == [[(0, 0)], [(1, 0)], [(0, 1)]]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["reroll/groups"] for entry in logged] == [0, 0, 1]
    assert reroll.queue.waiting == (0,)
