"""How a step is cut into micro-batches, even in the middle of it when memory runs out, changes no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.errors import MemoryFault
from tests.support.out_of_memory import run_out
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
PER_STEP = ROWS // 4
STREAMING = {
    "groups_per_chunk": 1,
    "trains_early": True,
    "rows_per_step": ROWS,
    "token_estimate": ROWS * MAX_COMPLETION / 2,
}


def make_trainer(
    directory: Path,
    tiny_model: Path,
    recording: Recording,
    *,
    micro_batch_size: int = 4,
    prompts_per_step: int = len(PROMPTS),
    mask_truncated: bool = False,
    step: dict[str, Any] | None = None,
    **overrides: Any,
) -> AxolotlGRPOTrainer:
    """Two steps of plain descent: Adam would turn a rounding of a gradient near zero into a whole step."""
    torch.manual_seed(7)
    model, tokenizer = tiny_policy(tiny_model)
    settings = {"optim": "sgd", "learning_rate": 0.1, "beta": 0.0, "max_steps": 2, **overrides}
    args = arguments(
        directory, gradient_accumulation_steps=1, per_device_train_batch_size=prompts_per_step * GROUP_SIZE, **settings
    )
    return our_trainer(
        model,
        tokenizer,
        args,
        recording,
        micro_batch_size=micro_batch_size,
        importance=ImportanceSpec("token_truncate", cap=3.0),
        prompts_per_step=prompts_per_step,
        mask_truncated=mask_truncated,
        peft_config=lora(),
        step=step,
    )


def trained(trainer: AxolotlGRPOTrainer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights at the end, and what was logged."""
    trainer.train()
    trainer.pipeline.close()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return weights, [entry for entry in trainer.state.log_history if "loss" in entry]


def require_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_step_that_ran_out_of_memory_learns_the_same(
    tmp_path: Path, tiny_model: Path, loss_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = record(eos=2)
    whole, logged = trained(make_trainer(tmp_path / "whole", tiny_model, recording, loss_type=loss_type))
    for where, step in (("backward", None), ("forward", STREAMING)):
        trainer = make_trainer(tmp_path / where, tiny_model, recording, loss_type=loss_type, step=step)
        sizes = run_out(trainer, where, PER_STEP + 3)
        again, logged_again = trained(trainer)
        require_equal(again, whole)
        assert sizes == [4] * (PER_STEP + 3) + [2] * (2 * PER_STEP), "the step is run again, and the size stays"
        assert capsys.readouterr().err.count("out of memory in step 2 with 4 completions at once") == 1
        for ours, theirs in zip(logged_again, logged, strict=True):
            for name in ("loss", "grad_norm", "reward", "completions/mean_length", "ledger/trained", "entropy"):
                # Of the entropy a mean of means over tokens is logged, which depends on the cut.
                tolerance = 0.02 if name == "entropy" else 1e-5
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=1e-7), name


def test_what_was_logged_of_the_attempt_is_forgotten(tmp_path: Path, tiny_model: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_model, record(eos=2), max_steps=1)
    run_out(trainer, "backward", PER_STEP)
    metrics = trainer._metrics["train"]
    lengths: dict[str, int] = {}

    class Count(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            lengths.update({name: len(values) for name, values in metrics.items()})

    trainer.add_callback(Count())
    trainer.train()
    assert lengths["entropy"] == lengths["clip_ratio/low_mean"] == 2 * PER_STEP
    assert lengths["sampling/effective_sample_size"] == lengths["reward"] == 1


def test_where_the_reference_policy_ran_out_of_memory_the_adapter_is_there_again(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Every micro-batch has a pass of the model without its adapter first."""
    shape = {"loss_type": "grpo", "beta": 0.1, "max_steps": 1}
    whole, _ = trained(make_trainer(tmp_path / "whole", tiny_model, record(eos=2), **shape))
    trainer = make_trainer(tmp_path / "again", tiny_model, record(eos=2), **shape)
    run_out(trainer, "forward", 3)
    require_equal(trained(trainer)[0], whole)


@pytest.mark.parametrize(
    ("micro_batch_size", "passes", "what", "way_out"),
    [
        (4, (2, 7), r"in step 1 with 2 completions at once, for the second time", "lower micro_batch_size to 1 "),
        (2, (2, 4), r"in step 1 with 1 completion at once, for the second time", "lower trl.max_completion_length"),
        (1, (2,), r"in step 1 with 1 completion at once$", "lower trl.max_completion_length"),
    ],
)
def test_the_second_time_is_an_error_that_says_what_to_lower(
    tmp_path: Path, tiny_model: Path, micro_batch_size: int, passes: tuple[int, ...], what: str, way_out: str
) -> None:
    trainer = make_trainer(tmp_path, tiny_model, record(eos=2), micro_batch_size=micro_batch_size)
    run_out(trainer, "forward", *passes)
    with pytest.raises(MemoryFault, match=what) as problem:
        trainer.train()
    fault = problem.value
    assert (fault.exit_code, fault.code) == (10, "E-MEM-01")
    assert fault.do.startswith(way_out)
    assert "logits [" in fault.why and ", 384] = " in fault.why and "Tried to allocate 2.00 GiB" in fault.why


def test_other_faults_are_not_repeated(tmp_path: Path, tiny_model: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_model, record(eos=2))
    sizes = run_out(trainer, "forward", 2, make=RuntimeError)
    with pytest.raises(RuntimeError, match="Tried to allocate"):
        trainer.train()
    assert len(sizes) == 2


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo", "cispo", "vespo"])
def test_a_step_with_one_token_in_one_of_two_micro_batches(tmp_path: Path, tiny_model: Path, loss_type: str) -> None:
    """All completions but one are cut off and masked, and that one is a single token."""
    ids, reward = [[[40 + place] * 3 for place in range(GROUP_SIZE - 1)] + [[2]]], [[0.0]] * (GROUP_SIZE - 1) + [[1.0]]
    logps = [[[-5.0] * len(completion) for completion in ids[0]]]
    recording = Recording(ids * 3, logps * 3, [reward] * 3)
    shape = {"prompts_per_step": 1, "mask_truncated": True, "loss_type": loss_type, "max_steps": 1}
    whole, (logged,) = trained(make_trainer(tmp_path / "1", tiny_model, recording, micro_batch_size=8, **shape))
    halves, (logged_halves,) = trained(make_trainer(tmp_path / "2", tiny_model, recording, micro_batch_size=4, **shape))
    assert logged["grad_norm"] > 1e-3
    assert logged_halves["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-5)
    require_equal(halves, whole)
