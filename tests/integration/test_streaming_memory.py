"""What a step holds in memory at once falls with the chunk: counted, not estimated, from every allocation of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer
from axolotl.core.trainers.grpo.specs import StepSpec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from tests.fakes.server import scripted_server
from tests.support.recorded import arguments, tiny_policy
from tests.support.served import TokenRewards, claimed, served_trainer

GROUPS, GROUP_SIZE, TOKENS = 8, 4, 24
PROMPTS = [(10 + row, 40, 50 + row) for row in range(GROUPS)]
ROWS = GROUPS * GROUP_SIZE


class SecondStep:
    """Counts while the second optimizer step is made: the first one fills what stays."""

    def __init__(self, trainer: AxolotlGRPOTrainer) -> None:
        self.peak = 0
        self.forwards: list[int] = []
        step, forward = trainer._run_step, trainer._run_forward

        def counted(*args: Any) -> Any:
            if trainer.state.global_step != 1:
                return step(*args)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
                ran = step(*args)
            self.peak = peak_bytes(run)
            return ran

        def noted(model: Any, inputs: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == 1:
                self.forwards.append(len(inputs["completion_ids"]))
            return forward(model, inputs, **kwargs)

        trainer._run_step = counted  # type: ignore[method-assign]
        trainer._run_forward = noted  # type: ignore[method-assign]


def peak_bytes(run: profile) -> int:
    """The most bytes that were allocated since the profile began and not freed again."""
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def second_step(directory: Path, tiny_model: Path, groups_per_chunk: int | None) -> tuple[SecondStep, list[int]]:
    """With one micro-batch for all that is there; and how many completions were scored at once."""
    torch.manual_seed(7)
    model, tokenizer = tiny_policy(tiny_model)
    args = arguments(
        directory / "out",
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=TOKENS,
        max_steps=2,
        loss_type="dapo",
        beta=0.0,
    )
    streaming: dict[str, Any] = {"groups_per_chunk": groups_per_chunk, "trains_early": True, "rows_per_step": ROWS}
    rewards = TokenRewards()
    with scripted_server() as server, claimed(server.url, directory) as client:
        trainer = served_trainer(
            model,
            tokenizer,
            args,
            client,
            directory,
            prompts=PROMPTS,
            spec=StepSpec(ROWS, "dapo", token_estimate=ROWS * TOKENS / 2, **(streaming if groups_per_chunk else {})),
            prompts_per_step=GROUPS,
            make_producer=lambda maker: BackgroundProducer(maker.make, depth=0, close_backend=maker.backend.close),
            rewards=rewards,
            importance=ImportanceSpec("token_truncate", cap=3.0),
        )
        counted = SecondStep(trainer)
        trainer.train()
        trainer.pipeline.close()
    return counted, rewards.calls[len(rewards.calls) // 2 :]


def test_the_peak_falls_with_the_chunk(tmp_path: Path, tiny_model: Path) -> None:
    """8 groups of 4: all 32 completions in one pass, or a quarter or an eighth of them in four or eight.

    Logits, activations and what autograd keeps of them go with the completions of a pass; gradients of the adapter,
    which they add up to, do not.
    """
    peaks = []
    for chunk, rows in ((None, 32), (4, 16), (2, 8), (1, 4)):
        counted, scored = second_step(tmp_path / str(chunk), tiny_model, chunk)
        assert counted.forwards == [rows] * (32 // rows) == scored
        peaks.append(counted.peak)
    whole, half, quarter, eighth = peaks
    logits = ROWS * (TOKENS + 1) * 384 * 4
    assert whole > 2 * logits, "the logits and their log-softmax are alive at once"
    assert half < 0.6 * whole and quarter < 0.35 * whole and eighth < 0.25 * whole, peaks
