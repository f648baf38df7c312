"""Off-policy corrections through the trainer's whole loss, against numbers worked by hand.

Two completions, of three tokens and of two, with advantages 1 and -1. The forward pass is replaced by given log-probs,
so that ratios are chosen and gradients can be read off. The loss is `grpo`: the mean over completions of the mean over
tokens of -advantage x weight, and its gradient at a token -advantage x weight / (2 x length).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from axolotl.core.trainers.grpo.algo.importance import ImportanceMode, ImportanceSpec
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from tests.support.recorded import arguments, our_trainer, record, tiny_policy
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.contract

LN2 = math.log(2.0)
MODES: tuple[ImportanceMode, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
# The policy's log-probs over the sampler's: ratios 4, 1/2, 1 and 2, 2. Their products are 2 and 4.
LOG_RATIOS = torch.tensor([[2 * LN2, -LN2, 0.0], [LN2, LN2, 0.0]])
POLICY = torch.tensor([[-1.0, -2.0, -3.0], [-1.5, -2.5, 0.0]])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class Loss:
    """Our trainer with the log-probs of its forward pass given."""

    def __init__(self, model_dir: Path, directory: Path, importance: ImportanceSpec | None, **options: Any) -> None:
        model, tokenizer = tiny_policy(model_dir)
        settings = {"loss_type": "grpo", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
        args = arguments(directory, **{**settings, **options})
        recording = record(tokenizer.eos_token_id)
        self.trainer: AxolotlGRPOTrainer = our_trainer(
            model, tokenizer, args, recording, micro_batch_size=8, importance=importance
        )
        self.model = model

    def __call__(
        self, monkeypatch: pytest.MonkeyPatch, *, log_ratios: torch.Tensor = LOG_RATIOS, **inputs: torch.Tensor
    ) -> tuple[float, list[list[float]]]:
        """The loss, and its gradient at every token."""
        logps = POLICY.clone().requires_grad_()
        monkeypatch.setattr(self.trainer, "_run_forward", lambda *_, **__: (logps, torch.zeros_like(POLICY), None))
        sampling = POLICY - log_ratios
        given = {
            "prompt_ids": torch.ones(2, 2, dtype=torch.long),
            "prompt_mask": torch.ones(2, 2, dtype=torch.long),
            "completion_ids": torch.ones(2, 3, dtype=torch.long),
            "completion_mask": MASK,
            "advantages": torch.tensor([1.0, -1.0]),
            "num_items_in_batch": torch.tensor(5.0),
            "sampling_per_token_logps": sampling,
            "tool_mask": sampling.isfinite().long(),
        }
        self.trainer.current_gradient_accumulation_steps = 1.0  # type: ignore[assignment]
        loss = self.trainer.compute_loss(self.model, {**given, **inputs})
        loss.backward()
        assert logps.grad is not None
        return loss.item(), logps.grad.tolist()


def rows(gradient: list[list[float]]) -> Any:
    return [pytest.approx(row, abs=1e-7) for row in gradient]


@pytest.mark.parametrize(
    ("mode", "loss", "gradient"),
    [
        # Weights 3, 1/2, 1 and 2, 2: (-(3 + 0.5 + 1) / 3 + (2 + 2) / 2) / 2.
        ("token_truncate", 0.25, [[-3 / 6, -0.5 / 6, -1 / 6], [2 / 4, 2 / 4, 0]]),
        # Weights 0, 1/2, 1 and 2, 2.
        ("token_mask", 0.75, [[0, -0.5 / 6, -1 / 6], [2 / 4, 2 / 4, 0]]),
        # Weights 2 and 3.
        ("sequence_truncate", 0.5, [[-2 / 6, -2 / 6, -2 / 6], [3 / 4, 3 / 4, 0]]),
        # Weights 2 and 0.
        ("sequence_mask", -1.0, [[-2 / 6, -2 / 6, -2 / 6], [0, 0, 0]]),
    ],
)
def test_the_four_modes_with_a_cap(
    mode: ImportanceMode,
    loss: float,
    gradient: list[list[float]],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Loss(model_dir, tmp_path, ImportanceSpec(mode, 3.0))(monkeypatch) == (pytest.approx(loss), rows(gradient))


@pytest.mark.parametrize(
    ("mode", "loss", "gradient"),
    [
        # Weights 4, 0.8, 1 and 2, 2.
        ("token_truncate", (-5.8 / 3 + 2) / 2, [[-4 / 6, -0.8 / 6, -1 / 6], [2 / 4, 2 / 4, 0]]),
        ("token_mask", (-5 / 3 + 2) / 2, [[-4 / 6, 0, -1 / 6], [2 / 4, 2 / 4, 0]]),
        # The floor of the sequence modes is 2.5 here: weights 2.5 and 4, then 0 and 4.
        ("sequence_truncate", 0.75, [[-2.5 / 6] * 3, [4 / 4, 4 / 4, 0]]),
        ("sequence_mask", 2.0, [[0, 0, 0], [4 / 4, 4 / 4, 0]]),
    ],
)
def test_the_four_modes_with_a_floor(
    mode: ImportanceMode,
    loss: float,
    gradient: list[list[float]],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = ImportanceSpec(mode, 5.0, 0.8 if mode.startswith("token") else 2.5)
    assert Loss(model_dir, tmp_path, spec)(monkeypatch) == (pytest.approx(loss), rows(gradient))


@pytest.mark.parametrize("is_corrected", [True, False], ids=["kl times ratio", "plain kl"])
def test_of_a_masked_token_the_kl_term_has_no_gradient_either(
    is_corrected: bool, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is twice as sure of every token: KL 1 - ln 2, gradient -1, times the ratio 1 - ln 2 - 1 = -ln 2."""
    run = Loss(model_dir, tmp_path, ImportanceSpec("token_mask", 3.0), beta=0.5, use_bias_correction_kl=is_corrected)
    loss, gradient = run(monkeypatch, ref_per_token_logps=POLICY + LN2)
    pull = 0.5 * (-LN2 if is_corrected else -1.0)
    assert loss == pytest.approx(0.75 + 0.5 * (1 - LN2))
    assert gradient == rows(
        [[0, (pull - 0.5) / 6, (pull - 1) / 6], [(2 + pull) / 4, (2 + pull) / 4, 0]],
    )
    assert gradient[0][0] == 0.0


def test_the_kl_term_is_weighted_by_how_far_the_policy_has_moved(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since it was scored the policy has become twice as sure of every token: ratio 2."""
    for is_corrected, factor in ((True, 2.0), (False, 1.0)):
        run = Loss(model_dir, tmp_path, None, beta=0.5, use_bias_correction_kl=is_corrected)
        loss, _ = run(
            monkeypatch,
            advantages=torch.zeros(2),
            old_per_token_logps=POLICY - LN2,
            ref_per_token_logps=POLICY + LN2,
        )
        assert loss == pytest.approx(0.5 * factor * (1 - LN2))


def test_a_masked_token_has_no_part_in_a_ratio_per_sequence(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coefficient of a completion is the exponential of its mean log-ratio, every token of it 1/length: weights
    0, 1/2, 1 give -(1.5 / 3) / 3 / 2, weights 2, 2 give (4 / 2) / 2 / 2."""
    run = Loss(model_dir, tmp_path, ImportanceSpec("token_mask", 3.0), importance_sampling_level="sequence")
    _, gradient = run(monkeypatch)
    assert gradient == rows([[0, -1 / 12, -1 / 12], [0.5, 0.5, 0]])
    assert gradient[0][0] == 0.0


def test_importance_sampling_level(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-ratios ln 1.5, 0, 0 since the completion was scored. Per token they are clipped at 1.2; per sequence the
    coefficient is 1.5 ** (1/3) = 1.1447, within the bounds."""
    old = POLICY - torch.tensor([[math.log(1.5), 0.0, 0.0], [0.0, 0.0, 0.0]])
    for level, mean in (("token", 3.2 / 3), ("sequence", 1.5 ** (1 / 3))):
        run = Loss(model_dir, tmp_path, None, importance_sampling_level=level)
        loss, _ = run(monkeypatch, old_per_token_logps=old)
        assert loss == pytest.approx((-mean + 1) / 2)


def test_vespo_leaves_out_the_completion_of_a_masked_token(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight of a completion is a product: 0 for the first; 4 for the second, where phi is e^2 4^3 e^-8."""
    run = Loss(model_dir, tmp_path, ImportanceSpec("token_mask", 3.0), loss_type="vespo")
    _, gradient = run(monkeypatch)
    phi = 64 * math.exp(-6)
    assert gradient == [[0.0, 0.0, 0.0], pytest.approx([phi / 5, phi / 5, 0])]


# The sampler was surer of all tokens than the policy is: by 0.9, 0.6 and 0 nats, 0.5 on average, and by 0.5 and 0.5.
DRIFT = -torch.tensor([[0.9, 0.6, 0.0], [0.5, 0.5, 0.0]])


@pytest.mark.parametrize(
    ("advantages", "threshold", "kept"),
    [
        ([-1.0, -1.0], 0.6, [1, 1]),
        ([-1.0, -1.0], 0.4, [0, 0]),
        # Whatever is better than its group stays, however far away.
        ([1.0, -1.0], 0.4, [1, 0]),
        ([-1.0, 0.0], 0.4, [0, 1]),
    ],
)
@pytest.mark.parametrize("with_weights", [False, True], ids=["alone", "with weights"])
def test_the_off_policy_mask(
    with_weights: bool,
    advantages: list[float],
    threshold: float,
    kept: list[int],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = ImportanceSpec("token_truncate", 3.0) if with_weights else None
    run = Loss(model_dir, tmp_path, spec, off_policy_mask_threshold=threshold)
    loss, gradient = run(monkeypatch, log_ratios=DRIFT, advantages=torch.tensor(advantages))
    weights = (DRIFT.exp() if with_weights else torch.ones(2, 3)) * MASK
    expected = [
        [-a * k * w / (2 * length) for w in row]
        for a, k, row, length in zip(advantages, kept, weights.tolist(), (3, 2), strict=True)
    ]
    assert gradient == rows(expected)
    assert loss == pytest.approx(sum(map(sum, expected)), abs=1e-7)
    assert run.trainer._record_sampling("train").tolist() == [not k for k in kept]
    assert run.trainer._metrics["train"]["sampling/off_policy_masked"] == [1 - sum(kept) / 2]
    assert run.trainer._record_sampling("train").numel() == 0, "a step starts with nothing remembered"


def test_the_off_policy_mask_compares_with_the_sampler_not_with_an_old_policy(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Loss(model_dir, tmp_path, None, off_policy_mask_threshold=0.4)
    run(monkeypatch, log_ratios=DRIFT, advantages=-torch.ones(2), old_per_token_logps=POLICY)
    assert run.trainer._record_sampling("train").tolist() == [True, True]


def test_the_off_policy_mask_leaves_the_kl_term(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Loss(model_dir, tmp_path, None, off_policy_mask_threshold=0.4, beta=0.5, use_bias_correction_kl=False)
    _, gradient = run(monkeypatch, log_ratios=DRIFT, advantages=-torch.ones(2), ref_per_token_logps=POLICY + LN2)
    assert gradient == rows([[-0.5 / 6] * 3, [-0.5 / 4, -0.5 / 4, 0]])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Without its first token the first completion has two, with ratios 1/2 and 1.
        ("token_truncate", [0, -0.5 / 4, -1 / 4]),
        ("token_mask", [0, -0.5 / 4, -1 / 4]),
        ("sequence_truncate", [0, -0.5 / 4, -0.5 / 4]),
        ("sequence_mask", [0, -0.5 / 4, -0.5 / 4]),
    ],
)
def test_an_unknown_token_is_out_of_the_loss_in_every_mode(
    mode: ImportanceMode,
    expected: list[float],
    value: float,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log_ratios = LOG_RATIOS.clone()
    log_ratios[0, 0] = value
    run = Loss(model_dir, tmp_path, ImportanceSpec(mode, 5.0), beta=0.5)
    loss, gradient = run(
        monkeypatch, log_ratios=log_ratios, ref_per_token_logps=POLICY, advantages=torch.tensor([1.0, 1.0])
    )
    assert math.isfinite(loss)
    assert gradient[0] == pytest.approx(expected)
    assert gradient[0][0] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_unknown_token_is_no_evidence_for_the_off_policy_mask(
    value: float, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first completion's 0.9, 0.6 and 0 the first is unknown: 0.3 on average, below the threshold."""
    drift = DRIFT.clone()
    drift[0, 0] = value
    run = Loss(model_dir, tmp_path, None, off_policy_mask_threshold=0.4)
    run(monkeypatch, log_ratios=drift, advantages=-torch.ones(2))
    assert run.trainer._record_sampling("train").tolist() == [False, True]


def test_what_is_logged_of_a_step(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches: maxima and shares are those of all of it."""
    run = Loss(model_dir, tmp_path, ImportanceSpec("sequence_mask", 3.0))
    run(monkeypatch)
    run(monkeypatch, log_ratios=torch.zeros(2, 3))
    assert run.trainer._record_sampling("train").tolist() == [False, True, False, False]
    logged = {name: values for name, values in run.trainer._metrics["train"].items() if "importance" in name}
    assert logged == {
        "sampling/importance_sampling_ratio/min": [0.0],
        "sampling/importance_sampling_ratio/mean": [pytest.approx(1.0)],
        "sampling/importance_sampling_ratio/max": [pytest.approx(2.0)],
        "sampling/importance_sampling_ratio_unclipped/min": [pytest.approx(1.0)],
        "sampling/importance_sampling_ratio_unclipped/mean": [pytest.approx(2.0)],
        "sampling/importance_sampling_ratio_unclipped/max": [pytest.approx(4.0)],
        "sampling/importance_sampling_ratio_changed": [0.25],
    }
