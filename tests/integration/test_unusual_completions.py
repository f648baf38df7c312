"""Completions that are cut off, empty, replayed, or that nobody can score, through the whole trainer, worked by hand.

A server answers with tokens and rewards that the tests choose. The importance weights are bounded by 1 from both sides
and the policy has not moved since it was asked, so that the losses are sums of advantages:

    dapo     - sum over tokens of A / tokens of the step
    grpo     - sum over completions of A / completions, where a completion without a known token adds nothing
    dr_grpo  - sum over tokens of A / (completions x max_completion_length)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.algo.advantages import AdvantageSpec
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.generation.server import ServerBackend
from axolotl.core.trainers.grpo.ledger import Counts
from axolotl.core.trainers.grpo.protocols import DataProducer, GenerationBackend
from axolotl.core.trainers.grpo.replaying import Replay
from axolotl.core.trainers.grpo.rewards.function import RewardFunction
from axolotl.core.trainers.grpo.rewards.inline import InlineRewards
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer
from axolotl.core.trainers.grpo.rollout.making import GroupMaker
from axolotl.core.trainers.grpo.rollout.producer import SyncProducer
from axolotl.core.trainers.grpo.rollout.replay import ReplayBuffer, ReplaySpec
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.core.trainers.grpo.types import CompletionGroup, PromptRow
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import Completion, GenerateRequest, Group, Sampling
from tests.fakes.server import logprob, scripted_server
from tests.support.recorded import arguments, tiny_policy
from tests.support.served import claimed, served_trainer

PROMPTS = [(10 + row, 40, 50 + row) for row in range(2)]
GROUP_SIZE, MAX_TOKENS = 4, 6
LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
ONES = ImportanceSpec("token_truncate", cap=1.0, floor=1.0)
# What keeps the quotient finite.
FLOOR = 1e-4

# The tokens of a completion, and whether it was cut off.
Answer = tuple[Sequence[int], bool]


def tokens(count: int, *, is_cut: bool = False) -> Answer:
    return range(20, 20 + count), is_cut


@dataclass(frozen=True)
class Script:
    """answers: `[prompts][G]`, the same at every step."""

    answers: Sequence[Sequence[Answer]]

    def __call__(self, request: GenerateRequest, index: int) -> Group:
        answers = self.answers[request.prompts[index][0] - 10]
        completions = [
            Completion(
                ids=list(ids),
                logprobs=[logprob(token, request.adapter_version) for token in ids],
                finish_reason="length" if is_cut else "stop",
            )
            for ids, is_cut in answers
        ]
        return Group(index=index, completions=completions)


@dataclass
class Run:
    """logged: an entry a step. before, after: the trained weights. gradients: the largest entry of any, a step."""

    trainer: AxolotlGRPOTrainer
    logged: list[dict[str, Any]]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    gradients: list[float]

    @property
    def counts(self) -> Counts:
        self.trainer.pipeline.books.ledger.balance()
        return self.trainer.pipeline.books.ledger.counts

    @property
    def has_moved(self) -> bool:
        return any(not torch.equal(self.before[name], value) for name, value in self.after.items())

    def require_finite(self) -> None:
        for entry in self.logged:
            strange = {name: v for name, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
            assert not strange and entry["skipped_nonfinite_steps"] == 0
        assert all(bool(value.isfinite().all()) for value in self.after.values())


def run(
    directory: Path,
    tiny_model: Path,
    answers: Sequence[Sequence[Answer]],
    rewards: Sequence[Sequence[float | None]],
    *,
    loss_type: str = "dapo",
    steps: int = 1,
    importance: ImportanceSpec | None = ONES,
    make_producer: Callable[[GroupMaker], DataProducer] = SyncProducer,
    make_backend: Callable[[ServerClient], GenerationBackend] = ServerBackend,
    micro_batch_size: int = 2,
    prompts_per_step: int | None = None,
    replay: Callable[[AdvantageSpec], Replay] | None = None,
    **step: Any,
) -> Run:
    """All prompts that `answers` has in a step, unless it says how many."""

    def given(completions: list[str], row: list[int], **kwargs: Any) -> list[float | None]:
        return [rewards[prompt][index % GROUP_SIZE] for index, prompt in enumerate(row)]

    torch.manual_seed(7)
    model, tokenizer = tiny_policy(tiny_model)
    num_prompts = prompts_per_step or len(answers)
    args = arguments(
        directory / "out",
        per_device_train_batch_size=num_prompts * GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        mask_truncated_completions=step.get("mask_truncated", False),
        max_steps=steps,
        loss_type=loss_type,
        weight_decay=0.0,
        beta=0.0,
    )
    with scripted_server() as server, claimed(server.url, directory) as client:
        server.answer = Script(answers)
        trainer = served_trainer(
            model,
            tokenizer,
            args,
            client,
            directory,
            prompts=PROMPTS[: len(answers)],
            spec=StepSpec(micro_batch_size, loss_type, **step),
            prompts_per_step=num_prompts,
            make_producer=make_producer,
            make_backend=make_backend,
            replay=replay,
            rewards=InlineRewards([RewardFunction("rewards.given", "given", given, "rewards.py")]),
            importance=importance,
        )
        gradients: list[float] = []
        admits = trainer.finite.admits

        def noting(step: int, model: torch.nn.Module, ran: Any) -> bool:
            found = [p.grad for p in model.parameters() if p.grad is not None]
            gradients.append(max(float(gradient.abs().max()) for gradient in found))
            return admits(step, model, ran)

        trainer.finite.admits = noting  # type: ignore[method-assign]
        before = weights(trainer)
        trainer.train()
        trainer.pipeline.close()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(trainer, logged, before, weights(trainer), gradients)


def weights(trainer: AxolotlGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def streaming(num_prompts: int) -> dict[str, Any]:
    rows = num_prompts * GROUP_SIZE
    return {
        "groups_per_chunk": 1,
        "trains_early": True,
        "rows_per_step": rows,
        "token_estimate": rows * MAX_TOKENS / 2,
        "make_producer": lambda maker: BackgroundProducer(maker.make, depth=0, close_backend=maker.backend.close),
    }


# -- every completion was cut off -------------------------------------------------------------------------------------

# Rewards 0, 0, 0, 1: mean 1/4, sample variance (3 x 1/16 + 9/16) / 3 = 1/4, deviation 1/2: A = -1/2 x 3 and 3/2.
LAST_IS_BEST = [0.0, 0.0, 0.0, 1.0]
# Of the floor that is added to the deviation.
SCALE = 0.5 / (0.5 + FLOOR)
CUT = [[tokens(count, is_cut=True) for count in (1, 2, 3, 4)]] * 2


@pytest.mark.parametrize(
    ("loss_type", "is_streaming"), [*((loss_type, False) for loss_type in LOSSES), ("grpo", True), ("dapo", True)]
)
def test_a_batch_that_is_all_cut_off_and_masked_is_a_step_that_changes_nothing(
    tmp_path: Path, tiny_model: Path, loss_type: str, is_streaming: bool
) -> None:
    step = streaming(2) if is_streaming else {}
    ran = run(tmp_path, tiny_model, CUT, [LAST_IS_BEST] * 2, loss_type=loss_type, steps=2, mask_truncated=True, **step)
    ran.require_finite()
    assert ran.trainer.state.global_step == 2
    assert [entry["loss"] for entry in ran.logged] == [0.0, 0.0]
    assert [entry["grad_norm"] for entry in ran.logged] == [0.0, 0.0] and ran.gradients == [0.0, 0.0]
    assert not ran.has_moved, "byte for byte"
    assert ran.counts == Counts(truncated=16)
    # Their rewards are known all the same.
    assert [entry["reward"] for entry in ran.logged] == [0.25, 0.25]
    assert [entry["completions/clipped_ratio"] for entry in ran.logged] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("loss_type", "loss"),
    [
        # Tokens 1, 2, 3 and 4 of advantages -1/2, -1/2, -1/2 and 3/2: -(-3 + 6) / 10.
        ("dapo", -0.3),
        ("bnpo", -0.3),
        ("grpo", 0.0),
        # -(-3 + 6) / (4 x 6)
        ("dr_grpo", -0.125),
    ],
)
def test_a_batch_that_is_all_cut_off_and_not_masked_is_trained_as_any_other(
    tmp_path: Path, tiny_model: Path, loss_type: str, loss: float
) -> None:
    ran = run(tmp_path, tiny_model, CUT, [LAST_IS_BEST] * 2, loss_type=loss_type)
    ran.require_finite()
    assert ran.trainer.last_step is not None
    assert ran.trainer.last_step[1] == pytest.approx(loss * SCALE, abs=1e-6)
    assert ran.gradients[0] > 0.0 and ran.has_moved
    assert ran.counts == Counts(trained=8)


# -- completions that nobody can score --------------------------------------------------------------------------------

WHOLE = [tokens(count) for count in (1, 2, 3, 4)]
# 1, 0 and 1/2: mean 1/2, sample variance (1/4 + 1/4) / 2, deviation 1/2: A = 1, -1 and 0.
ONE_IS_NONE = [1.0, None, 0.0, 0.5]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streaming"])
def test_a_reward_that_is_none_is_left_out_of_its_group_and_none_of_a_group_leave_it_out_of_the_gradient(
    tmp_path: Path, tiny_model: Path, is_streaming: bool
) -> None:
    """Their tokens count in what the loss is divided by: -(1 x 1 + 0 x 2 - 1 x 3 + 0 x 4 + 0 x 10) / 20 = 1/10."""
    step = streaming(2) if is_streaming else {}
    ran = run(tmp_path, tiny_model, [WHOLE] * 2, [ONE_IS_NONE, [None] * 4], **step)
    ran.require_finite()
    result, loss = ran.trainer.last_step or pytest.fail("no step")
    advantages = result.scored.advantages
    assert advantages.values.tolist() == pytest.approx([SCALE, 0, -SCALE, 0, 0, 0, 0, 0])
    assert [index for index, value in enumerate(advantages.values.tolist()) if value == 0.0] == [1, 3, 4, 5, 6, 7]
    assert loss == pytest.approx(0.1 * SCALE, abs=1e-6)
    assert ran.gradients[0] > 0.0
    (entry,) = ran.logged
    assert (entry["reward"], entry["rewards/given/mean"]) == (0.5, 0.5)
    # Of all rewards that there are: 1, 0 and 1/2.
    assert entry["reward_std"] == pytest.approx(0.5)
    assert entry["frac_reward_zero_std"] == 0.5
    # The last of the first group is as good as its group: it was trained, by a gradient of 0.
    assert ran.counts == Counts(unscorable=5, trained=3)


def test_two_that_can_be_scored_are_a_group_and_one_is_not(tmp_path: Path, tiny_model: Path) -> None:
    """1 and 0: mean 1/2, sample deviation 1/sqrt(2). A group of one teaches nothing: its completion has no signal.
    The loss: -(A x 1 - A x 4) / 20."""
    ran = run(tmp_path, tiny_model, [WHOLE] * 2, [[1.0, None, None, 0.0], [None, 7.0, None, None]])
    ran.require_finite()
    result, loss = ran.trainer.last_step or pytest.fail("no step")
    value = 0.5 / (math.sqrt(0.5) + FLOOR)
    assert result.scored.advantages.values.tolist() == pytest.approx([value, 0, 0, -value, 0, 0, 0, 0])
    assert loss == pytest.approx(3 * value / 20, abs=1e-6)
    assert ran.counts == Counts(unscorable=5, zero_signal=1, trained=2)
    assert ran.logged[0]["reward"] == pytest.approx(8 / 3)


@pytest.mark.parametrize("skips", [False, True], ids=["run", "skipped"])
def test_a_batch_without_any_reward_changes_nothing(
    tmp_path: Path, tiny_model: Path, skips: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(tmp_path, tiny_model, [WHOLE] * 2, [[None] * 4] * 2, steps=2, skips_zero_signal=skips)
    ran.require_finite()
    assert [entry["loss"] for entry in ran.logged] == [0.0, 0.0] and ran.gradients == [0.0, 0.0]
    assert not ran.has_moved and ran.trainer.state.global_step == 2
    assert ran.counts == Counts(unscorable=16)
    assert all(name not in entry for entry in ran.logged for name in ("reward", "reward_std", "rewards/given/mean"))
    assert capsys.readouterr().err.count("returned None for all 8 completions") == 1


# -- empty completions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstIsEmpty:
    """A generator that says nothing at all in the first completion of a group."""

    server: ServerBackend
    is_thread_safe: bool = True

    def generate(
        self, rows: Sequence[PromptRow], seeds: Any, sampling: Sampling, version: int
    ) -> Iterator[tuple[int, CompletionGroup]]:
        for place, group in self.server.generate(rows, seeds, sampling, version):
            first, *others = group.completions
            yield place, replace(group, completions=(replace(first, ids=(), logprobs=()), *others))

    def close(self) -> None:
        self.server.close()


# The end token alone is a completion of one token; the tokenizer's is 2.
SHORT = [[tokens(1), ((2,), False), tokens(3), tokens(4)]]


@pytest.mark.parametrize(
    ("loss_type", "loss", "importance"),
    [
        # Without the empty one 8 tokens, of advantages -1/2 x (1 + 3) and 3/2 x 4: -(-2 + 6) / 8.
        ("dapo", -0.5, ONES),
        ("dapo", -0.5, None),
        ("bnpo", -0.5, ONES),
        # The empty one is a completion without a loss: -(0 - 1/2 - 1/2 + 3/2) / 4.
        ("grpo", -0.125, ONES),
        # -(-2 + 6) / (4 x 6)
        ("dr_grpo", -1 / 6, ONES),
    ],
)
def test_an_empty_completion_has_a_reward_and_no_token(
    tmp_path: Path, tiny_model: Path, loss_type: str, loss: float, importance: ImportanceSpec | None
) -> None:
    ran = run(
        tmp_path,
        tiny_model,
        SHORT,
        [LAST_IS_BEST],
        loss_type=loss_type,
        importance=importance,
        make_backend=lambda client: FirstIsEmpty(ServerBackend(client)),
    )
    ran.require_finite()
    assert ran.trainer.last_step is not None
    assert ran.trainer.last_step[1] == pytest.approx(loss * SCALE, abs=1e-6)
    assert ran.logged[0]["reward"] == 0.25
    assert ran.gradients[0] > 0.0 and ran.has_moved
    # It has no token that could have a part in the gradient; the end token of the second one is a token.
    assert ran.counts == Counts(masked=1, trained=3)


def test_completions_of_the_end_token_alone_are_trained(tmp_path: Path, tiny_model: Path) -> None:
    """Four tokens of advantages -1/2, -1/2, -1/2 and 3/2: the loss is 0, its gradient is not."""
    ran = run(tmp_path, tiny_model, [[((2,), False)] * 4], [LAST_IS_BEST])
    ran.require_finite()
    assert ran.trainer.last_step is not None
    assert ran.trainer.last_step[1] == pytest.approx(0.0, abs=1e-6)
    assert ran.counts == Counts(trained=4)
    assert ran.logged[0]["completions/max_length"] == 1.0 and ran.logged[0]["reward"] == 0.25


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "luspo", "vespo"])
def test_a_batch_of_empty_completions_changes_nothing(tmp_path: Path, tiny_model: Path, loss_type: str) -> None:
    @dataclass(frozen=True)
    class Nothing(FirstIsEmpty):
        def generate(self, *args: Any, **kwargs: Any) -> Iterator[tuple[int, CompletionGroup]]:
            for place, group in self.server.generate(*args, **kwargs):
                empty = tuple(replace(one, ids=(), logprobs=()) for one in group.completions)
                yield place, replace(group, completions=empty)

    ran = run(
        tmp_path,
        tiny_model,
        SHORT,
        [LAST_IS_BEST],
        loss_type=loss_type,
        steps=2,
        make_backend=lambda client: Nothing(ServerBackend(client)),
    )
    ran.require_finite()
    assert [entry["loss"] for entry in ran.logged] == [0.0, 0.0] and ran.gradients == [0.0, 0.0]
    assert not ran.has_moved and ran.counts == Counts(masked=8)


# -- replayed completions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "loss", "counts"),
    [
        # Again -(-3 + 6) / 10, the tokens being those of the group that is trained.
        (4, -0.3, Counts(trained=4, zero_signal=4, replayed=4)),
        (0, 0.0, Counts(trained=4, zero_signal=4)),
    ],
    ids=["replay", "none"],
)
def test_what_stands_in_for_a_group_without_signal_has_its_own_advantages_and_tokens(
    tmp_path: Path, tiny_model: Path, size: int, loss: float, counts: Counts
) -> None:
    """Two steps of one prompt: the first has lengths 1 2 3 4 and a signal, the second four times 5 tokens and none."""
    ran = run(
        tmp_path,
        tiny_model,
        [WHOLE, [tokens(5)] * 4],
        [LAST_IS_BEST, [0.5] * 4],
        steps=2,
        prompts_per_step=1,
        replay=lambda spec: Replay(ReplayBuffer(ReplaySpec(size, 16, seed=0)), spec, True),
    )
    ran.require_finite()
    first, _ = ran.logged
    assert first["loss"] == pytest.approx(-0.3 * SCALE, abs=1e-4)
    assert ran.trainer.last_step is not None and ran.trainer.last_step[1] == pytest.approx(loss * SCALE, abs=1e-6)
    assert ran.counts == counts
    assert (ran.gradients[1] > 0.0) == (size > 0)
    # Rewards and lengths in the logs are those of the prompt that was drawn.
    assert ran.logged[1]["reward"] == 0.5 and ran.logged[1]["completions/mean_length"] == 5.0
