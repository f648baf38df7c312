"""Several optimizer steps on a rollout, through the whole trainer and through `axolotl train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from axolotl.cli.main import main
from axolotl.core.run.checkpoints.manifest import seal
from axolotl.core.run.journal import read_journal, standing
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.replaying import Replay
from axolotl.core.trainers.grpo.rollout.background import BackgroundProducer
from axolotl.core.trainers.grpo.rollout.planning import Reroll
from axolotl.core.trainers.grpo.rollout.replay import ReplayBuffer, ReplaySpec
from axolotl.core.trainers.grpo.rollout.reroll import RerollQueue, RerollSpec
from axolotl.core.trainers.grpo.span import Span
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from tests.support.out_of_memory import run_out
from tests.support.project import make_project, metrics
from tests.support.recorded import (
    GROUP_SIZE,
    MAX_COMPLETION,
    Recording,
    arguments,
    lora,
    our_trainer,
    record,
    tiny_policy,
)

# One prompt a step, three steps a pass, two passes: the three prompts are one rollout of six steps.
SPAN = Span(3, 2)
STREAMING = {
    "groups_per_chunk": 2,
    "trains_early": True,
    "rows_per_step": GROUP_SIZE,
    "token_estimate": GROUP_SIZE * MAX_COMPLETION / 2,
}


def make_trainer(
    directory: Path, tiny_model: Path, recording: Recording, *, span: Span = SPAN, loss_type: str = "dapo", **parts: Any
) -> AxolotlGRPOTrainer:
    torch.manual_seed(7)
    model, tokenizer = tiny_policy(tiny_model)
    args = arguments(
        directory,
        optim="sgd",
        learning_rate=0.1,
        per_device_train_batch_size=GROUP_SIZE,
        gradient_accumulation_steps=1,
        max_steps=2 * span.length,
        loss_type=loss_type,
        beta=0.0,
    )
    return our_trainer(
        model,
        tokenizer,
        args,
        recording,
        micro_batch_size=4,
        importance=ImportanceSpec("token_truncate", cap=3.0),
        peft_config=lora(),
        step={"span": span, **parts.pop("step", {})},
        **parts,
    )


def trained(trainer: AxolotlGRPOTrainer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    trainer.train()
    trainer.pipeline.close()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return weights, [entry for entry in trainer.state.log_history if "loss" in entry]


def require_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


def background(depth: int) -> Any:
    return lambda maker: BackgroundProducer(maker.make, depth=depth)


@pytest.mark.parametrize("step", [{}, STREAMING], ids=["whole", "streaming"])
@pytest.mark.parametrize("number", [2, 4, 8], ids=["first step", "log-probs for later", "second step"])
def test_memory_may_run_out_in_any_pass(tmp_path: Path, tiny_model: Path, step: dict[str, Any], number: int) -> None:
    """A rollout's first step has two passes a slice, of which those of the first slice train."""
    recording = record(eos=2)
    parts = {"step": step, "make_producer": background(0)} if step else {}
    whole, logged = trained(make_trainer(tmp_path / "whole", tiny_model, recording, **parts))
    trainer = make_trainer(tmp_path / "again", tiny_model, recording, **parts)
    sizes = run_out(trainer, "forward", number)
    again, logged_again = trained(trainer)
    assert sizes.count(4) == number and {*sizes[number:]} == {2}
    require_equal(again, whole)
    for ours, theirs in zip(logged_again, logged, strict=True):
        for name in ("loss", "grad_norm", "reward", "ledger/trained"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_streaming_and_skipping_learn_what_the_whole_rollout_teaches(
    tmp_path: Path, tiny_model: Path, loss_type: str
) -> None:
    """Chunks of two groups cross the borders of the slices; the second prompt has no signal."""
    recording = record(eos=2)
    recording.rewards[1] = [[0.7]] * GROUP_SIZE
    whole, logged = trained(make_trainer(tmp_path / "whole", tiny_model, recording, loss_type=loss_type))
    streamed, stream_logged = trained(
        make_trainer(
            tmp_path / "streamed",
            tiny_model,
            recording,
            loss_type=loss_type,
            step={**STREAMING, "skips_zero_signal": True},
            make_producer=background(0),
        )
    )
    require_equal(streamed, whole)
    for ours, theirs in zip(stream_logged, logged, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)
        assert ours["reward"] == theirs["reward"]
    assert [entry["skipped_zero_adv_batches"] for entry in stream_logged] == [0, 2, 0] * 4
    assert [entry["staleness/max"] for entry in stream_logged] == [0, 1, 2, 3, 4, 5] * 2
    # Each completion is counted once, with the last step that trains it, and its tokens when they are made.
    assert [entry["ledger/trained"] for entry in logged] == [0, 0, 0, GROUP_SIZE, 0, GROUP_SIZE] * 2
    assert [entry["ledger/zero_signal"] for entry in logged] == [0, 0, 0, 0, GROUP_SIZE, 0] * 2
    tokens = [entry["num_tokens"] for entry in logged]
    assert tokens == [tokens[0]] * 6 + [2 * tokens[0]] * 6


def test_prefetching_makes_the_next_rollout_ahead(tmp_path: Path, tiny_model: Path) -> None:
    recording, span = record(eos=2), Span(1, 2)
    in_turn, _ = trained(make_trainer(tmp_path / "turn", tiny_model, recording, span=span))
    trainer = make_trainer(tmp_path / "ahead", tiny_model, recording, span=span, make_producer=background(1))
    ahead, logged = trained(trainer)
    require_equal(ahead, in_turn)
    assert [entry["staleness/max"] for entry in logged] == [0, 1, 2, 3]


def test_replay_and_reroll_act_once_a_rollout(tmp_path: Path, tiny_model: Path) -> None:
    """Of the first rollout prompt 1 teaches nothing and prompt 2 fails: the second one, made in place of the failed
    prompts, replays what was learned in the first."""
    recording = record(eos=2)
    recording.rewards[1], recording.rewards[2] = [[0.5]] * GROUP_SIZE, [[0.0]] * GROUP_SIZE
    reroll = Reroll(RerollQueue(RerollSpec(capacity=4, start_step=0)), max_groups=1, threshold=0.0)
    trainer = make_trainer(
        tmp_path,
        tiny_model,
        recording,
        replay=lambda spec: Replay(ReplayBuffer(ReplaySpec(10, 16, seed=0)), spec, True),
        reroll=reroll,
    )
    _, logged = trained(trainer)
    assert [entry.get("replay/replaced") for entry in logged] == [0, *[None] * 5, 1, *[None] * 5]
    assert logged[6]["replay/age_max"] == 6
    replayed = [entry["ledger/replayed"] for entry in logged]
    assert sum(replayed) == GROUP_SIZE and sum(replayed[6:9]) == 0
    assert reroll.queue.waiting == (2,)
    totals = trainer.pipeline.books.ledger
    assert totals.ordered == 2 * 3 * GROUP_SIZE and totals.replayed == GROUP_SIZE


@pytest.mark.parametrize(
    ("span", "forwards"),
    # Two micro-batches a step, in two rollouts; each slice but the first is run once more beforehand.
    [(Span(1, 1), [2, 2]), (Span(1, 2), [2, 2, 2, 2]), (Span(3, 1), [6, 2, 2, 6, 2, 2])],
)
def test_old_log_probs_cost_a_forward_pass_only_where_training_does_not_give_them(
    tmp_path: Path, tiny_model: Path, span: Span, forwards: list[int]
) -> None:
    trainer = make_trainer(tmp_path, tiny_model, record(eos=2), span=span)
    steps: list[int] = []
    run = trainer._run_forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        steps.append(trainer.state.global_step)
        return run(*args, **kwargs)

    trainer._run_forward = counting  # type: ignore[method-assign]
    trainer.train()
    assert [steps.count(step) for step in range(len(forwards))] == forwards


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_project(tmp_path, tiny_model, trl__num_iterations=2, trl__generation_batch_size=2, max_steps=8)
    return tmp_path


@pytest.mark.parametrize("options", [{}, {"full": True}], ids=["lora", "full"])
def test_a_run_that_resumes_in_the_middle_of_a_rollout_ends_as_if_nothing_had_happened(
    project: Path, options: dict[str, bool]
) -> None:
    """Rollouts of four steps; the checkpoints are those of steps 3 and 6, and the seventh step repeats a slice."""
    flags = ["--trl.replay_buffer_size", "4", "--trl.reroll_start_fraction", "0.0", "--trl.reroll_threshold", "1.0"]
    flags += ["--save_strategy", "steps", "--save_steps", "3"]
    flags += ["--adapter", "null", "--learning_rate", "1e-3"] if options else []
    name = "model.safetensors" if options else "adapter_model.safetensors"
    assert main(["train", "config.yaml", *flags, "--output_dir", "whole"]) == 0
    for step in (3, 6):
        out = f"from-{step}"
        (project / out).mkdir()
        (project / "whole" / f"checkpoint-{step}").rename(project / out / f"checkpoint-{step}")
        assert main(["train", "config.yaml", *flags, "--output_dir", out, "--resume"]) == 0
        ours, theirs = load_file(project / out / name), load_file(project / "whole" / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        last, whole = (
            {line["step"]: line for line in standing(read_journal(project / place / "journal.jsonl"))}
            for place in (out, "whole")
        )
        assert last == {step: line for step, line in whole.items() if step in last} and 8 in last
    logged = metrics(project / "whole")
    assert [entry["staleness/max"] for entry in logged] == [0, 1, 2, 3] * 2
    books = [
        json.loads((project / place / "checkpoint-6/rollouts/rank-0/ledger.json").read_text())
        for place in ("from-6", "from-3")
    ]
    assert books[0] == books[1]


def test_a_checkpoint_without_its_open_rollout_is_skipped_by_name(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rollouts of four steps: checkpoints 5 and 6 are in the middle of the second. Whatever took the rollout out of
    the newest, its manifest does not know of it."""
    flags = ["--save_strategy", "steps", "--save_steps", "1", "--max_steps", "8"]
    assert main(["train", "config.yaml", *flags, "--output_dir", "whole"]) == 0
    (project / "out").mkdir()
    for step in (5, 6):
        (project / "whole" / f"checkpoint-{step}").rename(project / "out" / f"checkpoint-{step}")
    newest = project / "out" / "checkpoint-6"
    for kind in ("json", "safetensors"):
        (newest / "rollouts" / "rank-0" / f"open.{kind}").unlink()
    (newest / "manifest.json").unlink()
    seal(newest, 6)
    assert main(["train", "config.yaml", *flags, "--resume"]) == 0
    said = capsys.readouterr().err
    assert "skipping out/checkpoint-6: rollouts/rank-0/open.json was not saved" in said
    assert "resuming from out/checkpoint-5" in said
    ours, theirs = (load_file(project / place / "adapter_model.safetensors") for place in ("out", "whole"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_run_that_ends_within_a_rollout_says_so_and_counts_what_it_trained(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rollouts of two steps and an evaluation after each step: the third step is the first of a rollout. Going on from
    there trains its completions again, and counts none of them twice."""
    flags = ["--trl.generation_batch_size", "1", "--save_strategy", "steps", "--save_steps", "1"]
    flags += ["--val_set_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "1"]
    assert main(["train", "config.yaml", *flags, "--max_steps", "3"]) == 0
    assert "max_steps 3 ends in the middle of a rollout" in capsys.readouterr().err
    assert counted(project / "out") == [0, 4, 4]
    assert main(["train", "config.yaml", *flags, "--max_steps", "4", "--resume"]) == 0
    assert "ends in the middle" not in capsys.readouterr().err
    assert counted(project / "out") == [0, 4, 4, 0]
    assert [entry["staleness/max"] for entry in metrics(project / "out")] == [0, 1, 0, 1]


def counted(directory: Path) -> list[float]:
    """Completions that the ledger put into any class, by step."""
    steps = metrics(directory)
    return [sum(value for name, value in step.items() if name.startswith("ledger/")) for step in steps]
