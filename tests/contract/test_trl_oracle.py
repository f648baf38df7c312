"""Our trainer against TRL's own on recorded rollouts: same loss, same gradient norm, same weights after the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo import trainer as trainer_module
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.span import ONE_STEP, Span
from tests.support.recorded import arguments, curve, lora, our_trainer, record, tiny_policy, trl_trainer
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.contract

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
QUANTITIES = ("loss", "grad_norm")
SPEC = ImportanceSpec("token_truncate", 3.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_head_in_chunks_and_at_once_are_the_same(
    loss_type: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the logits of the completions do not fit, TRL's head in chunks scores them."""
    monkeypatch.setattr(trainer_module, "_MAX_LOGITS", 0)
    assert_equal(*both(model_dir, tmp_path, loss_type=loss_type, corrected=True))


def both(
    model_dir: Path,
    tmp_path: Path,
    *,
    micro: int = 2,
    accumulation: int = 4,
    corrected: bool = False,
    adapter: bool = True,
    num_functions: int = 1,
    span: Span = ONE_STEP,
    clips: bool = False,
    **options: Any,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """TRL's curves and ours for the same recording, model and options."""
    names = (*QUANTITIES, "clip_ratio/region_mean") if clips else QUANTITIES
    model, tokenizer = tiny_policy(model_dir)
    recording = record(tokenizer.eos_token_id, num_functions=num_functions)
    kwargs: dict[str, Any] = {"peft_config": lora()} if adapter else {}
    importance_args = {
        "vllm_importance_sampling_mode": options.pop("mode", SPEC.mode),
        "vllm_importance_sampling_clip_max": SPEC.cap,
    }
    args = arguments(
        tmp_path / "trl",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        # TRL counts micro-batches.
        steps_per_generation=accumulation * span.num_slices,
        num_iterations=span.num_iterations,
        **importance_args,
        **options,
    )
    theirs = curve(trl_trainer(model, tokenizer, args, recording, corrected=corrected, **kwargs), *names)

    model, tokenizer = tiny_policy(model_dir)
    args = arguments(
        tmp_path / "ours", per_device_train_batch_size=micro * accumulation, gradient_accumulation_steps=1, **options
    )
    spec = ImportanceSpec(importance_args["vllm_importance_sampling_mode"], SPEC.cap) if corrected else None
    trainer = our_trainer(
        model,
        tokenizer,
        args,
        recording,
        micro_batch_size=micro,
        importance=spec,
        mask_truncated=options.get("mask_truncated_completions", False),
        step={"span": span},
        **kwargs,
    )
    return theirs, curve(trainer, *names)


def assert_equal(theirs: dict[str, list[float]], ours: dict[str, list[float]], num_steps: int = 3) -> None:
    assert len(theirs["loss"]) == num_steps
    assert max(map(abs, theirs["grad_norm"])) > 1e-4, "a comparison of zeros shows nothing"
    for name in QUANTITIES:
        # A loss near 0 is a difference of terms as large as the other steps' losses, which float32 rounds by 1e-7 each.
        rounding = 2e-7 * max(1.0, *map(abs, theirs[name]))
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=rounding), name


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_three_steps_equal_trl(loss_type: str, adapter: bool, model_dir: Path, tmp_path: Path) -> None:
    """The guide's batch: micro 2, accumulation 4, 8 completions; `bnpo` at accumulation 1, where TRL defines it."""
    shape = {"micro": 8, "accumulation": 1} if loss_type == "bnpo" else {}
    assert_equal(*both(model_dir, tmp_path, loss_type=loss_type, adapter=adapter, **shape))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "vespo"])
def test_with_importance_weights(loss_type: str, model_dir: Path, tmp_path: Path) -> None:
    assert_equal(*both(model_dir, tmp_path, loss_type=loss_type, corrected=True))


@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_modes(mode: str, model_dir: Path, tmp_path: Path) -> None:
    assert_equal(*both(model_dir, tmp_path, loss_type="dapo", corrected=True, mode=mode))


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"temperature": 0.7},
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"scale_rewards": "none"},
        {"scale_rewards": "batch"},
        {"off_policy_mask_threshold": 0.5},
        {"delta": 1.5},
        {"entropy_coef": 0.01, "micro": 8, "accumulation": 1},
        {"top_entropy_quantile": 0.5, "micro": 8, "accumulation": 1},
        {"mask_truncated_completions": True},
        {"epsilon": 0.1, "epsilon_high": 0.4},
        {"num_functions": 2, "reward_weights": [1.0, 0.5], "multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    assert_equal(*both(model_dir, tmp_path, corrected=True, **options))


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL shuffles the completions of a rollout before it cuts them into slices; ours are whole groups, in order."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)


SPANS = {"iterations": Span(1, 2), "slices": Span(2, 1), "both": Span(2, 2)}
# Plain descent: Adam would turn a rounding of a gradient near zero into a whole step. Many ratios get clipped.
DESCENT = {"optim": "sgd", "learning_rate": 0.1, "epsilon": 0.003}


@pytest.mark.parametrize("corrected", [False, True], ids=["in process", "corrected"])
@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_several_steps_on_a_rollout(
    loss_type: str, span: Span, corrected: bool, model_dir: Path, tmp_path: Path, in_order: None
) -> None:
    """Six steps; with `both` they end in the middle of a rollout."""
    shape = {"micro": 8, "accumulation": 1} if loss_type == "bnpo" else {}
    options = {"loss_type": loss_type, "max_steps": 6, "span": span, **DESCENT, **shape}
    theirs, ours = both(model_dir, tmp_path, corrected=corrected, clips=True, **options)
    assert_equal(theirs, ours, num_steps=6)
    clipped = ours["clip_ratio/region_mean"]
    assert clipped == pytest.approx(theirs["clip_ratio/region_mean"])
    assert [value > 0 for value in clipped] == [step % span.length > 0 for step in range(6)]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "cispo"},
        {"loss_type": "vespo"},
        {"loss_type": "luspo", "adapter": False},
        {"beta": 0.1},
        {"scale_rewards": "batch"},
        {"mode": "sequence_mask"},
        {"off_policy_mask_threshold": 0.5},
        {"mask_truncated_completions": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_several_steps_on_a_rollout(
    options: dict[str, Any], model_dir: Path, tmp_path: Path, in_order: None
) -> None:
    options = {**DESCENT, **options}
    curves = both(model_dir, tmp_path, corrected=True, max_steps=4, span=SPANS["both"], **options)
    assert_equal(*curves, num_steps=4)
