"""Every name of TRL and transformers that our trainer overrides, calls or sets. A release that moves one fails here."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

from axolotl.core.trainers.grpo import trainer as ours
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from tests.support.recorded import arguments, our_trainer, record, tiny_policy
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.contract


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("get_train_dataloader", ["self"]),
        ("get_eval_dataloader", ["self", "eval_dataset"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        ("prediction_step", ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"]),
        ("_compute_loss", ["self", "model", "inputs"]),
    ],
)
def test_methods_we_override_take_what_we_expect(name: str, expected: list[str]) -> None:
    assert parameters(getattr(GRPOTrainer, name)) == expected


def test_the_forward_seam_takes_what_we_pass_and_returns_three_values() -> None:
    names = parameters(GRPOTrainer._get_per_token_logps_and_entropies)
    assert names[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert {"compute_entropy", "compute_aux_loss"} <= set(names)


def test_the_off_policy_mask_takes_what_we_pass() -> None:
    names = ["advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold"]
    assert parameters(GRPOTrainer.get_off_policy_mask) == names


def test_everything_we_override_exists_above_us() -> None:
    overridden = [name for name in vars(AxolotlGRPOTrainer) if callable(getattr(AxolotlGRPOTrainer, name))]
    above = [name for name in overridden if hasattr(GRPOTrainer, name)]
    assert set(above) >= {"get_train_dataloader", "training_step", "compute_loss", "prediction_step", "_prepare_inputs"}
    # What is ours alone must not collide with a name that a future release uses for something else.
    assert set(overridden) - set(above) <= {
        "attach",
        "_remember_best",
        "restore_finished",
        "restore_best",
        "policy",
        "_run",
        "_run_step",
        "_forget_step",
        "_vocabulary",
        "_logits",
        "_loss",
        "_importance_weights",
        "_off_policy_kept",
        "_run_forward",
        "_reference_logps",
        "_logits_fit",
        "_record",
        "_present_logps",
        "_record_completions",
        "_record_sampling",
        "_remember",
        "_tell_bias",
    }


def test_attributes_that_the_loss_reads_and_we_set(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, tokenizer = tiny_policy(make_tiny_model(tmp_path / "model"))
    args = arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    trainer = our_trainer(model, tokenizer, args, record(tokenizer.eos_token_id), micro_batch_size=8, importance=None)
    for name in (
        "use_vllm",
        "vllm_importance_sampling_correction",
        "beta",
        "loss_type",
        "aux_loss_enabled",
        "ref_model",
        "eos_token_ids",
    ):
        assert name in vars(trainer) or hasattr(Trainer, name) or hasattr(trainer, name), name
    assert set(trainer._metrics) == {"train", "eval"}
    assert {"prompt", "completion", "rewards", "advantages", "extra"} <= set(trainer._logs)
    assert trainer.loss_is_scaled_for_ga is True
    # None without float16; a scaler is who skips steps then.
    assert trainer.accelerator.scaler is None


def test_the_loss_applies_what_we_put_into_its_inputs() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    for name in (
        "importance_sampling_ratio",
        "num_items_in_batch",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "tool_mask",
        "old_per_token_logps",
    ):
        assert f'"{name}"' in source, name
    assert "current_gradient_accumulation_steps" in source


def test_losses_that_divide_by_the_token_total_are_those_we_know() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'in ["cispo", "dapo", "vespo"]' in source
    assert {"cispo", "dapo", "vespo"} == ours.TOKEN_TOTAL_LOSSES


def test_the_config_still_refuses_what_our_batch_shape_relies_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="divisible"):
        GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=6, num_generations=4, use_cpu=True, bf16=False)
