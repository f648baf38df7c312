import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerControl

from axolotl.core.trainers.grpo.microbatch import MicroBatch
from axolotl.core.trainers.grpo.nonfinite import FiniteGuard, Ran, StopWhenNotFinite
from axolotl.errors import NumericError


class Ranks:
    """An accelerator, and `total`: `others` is what the other ranks say, call by call, when there are any."""

    def __init__(self, *others: float, scaler: Any = None, rank: int = 0) -> None:
        self.process_index, self.is_main_process = rank, rank == 0
        self.scaler = scaler
        self._others = list(others)

    def total(self, value: float) -> float:
        return value + self._others.pop(0) if self._others else value


class World:
    """A model with a gradient, an optimizer with moments, and the guard."""

    def __init__(self, directory: Path, accelerator: Ranks | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.said: list[str] = []
        self.directory = directory / "nonfinite"
        self.accelerator: Any = accelerator or Ranks()
        self.guard = FiniteGuard(
            self.accelerator, self.directory, lambda: self.model, self.accelerator.total, self.said.append
        )
        self.step = 0

    def run(self, *losses: float, advantages: float = 1.0, gradient: float = 1.0) -> bool:
        """One step; whether it was taken."""
        self.step += 1
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        ran = [micro_batch(number, loss, advantages) for number, loss in enumerate(losses)]
        is_taken = self.guard.admits(self.step, self.model, ran)
        if self.accelerator.scaler is None:
            self.optimizer.step()
        return is_taken

    def state(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.detach().clone() for value in (*self.model.parameters(), *moments)]


def micro_batch(number: int, loss: float, advantage: float = 1.0) -> Ran:
    inputs = {"completion_ids": torch.tensor([[number, 7]]), "advantages": torch.tensor([advantage])}
    return Ran(MicroBatch(inputs, share=0.5, rows=(0,), prompts=(40 + number,)), torch.tensor(loss))


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_finite_step_is_taken(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = world.state()
    assert world.run(0.5, -0.5)
    assert not equal(world.state()[: len(before)], before)
    assert not world.directory.exists() and world.said == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["loss", "advantage", "gradient"])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_as_they_are(
    tmp_path: Path, what: str, value: float
) -> None:
    world = World(tmp_path)
    assert world.run(0.5)
    before = world.state()
    numbers: dict[str, Any] = {"loss": {}, "advantage": {"advantages": value}, "gradient": {"gradient": value}}[what]
    assert not world.run(0.5, value if what == "loss" else 0.25, **numbers)
    assert equal(world.state(), before)
    assert len(world.said) == 1 and "step 2 is skipped: " in world.said[0] and what in world.said[0]
    assert world.run(0.5) and not equal(world.state(), before), "the next one is taken"
    world.guard.require()


def test_a_sum_of_finite_gradients_that_is_not_finite(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = world.state()
    assert not world.run(0.5, gradient=1e30)
    assert equal(world.state()[: len(before)], before)


def test_the_micro_batch_is_kept_without_pickle(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(0.5, math.nan, 0.25)
    record = json.loads((world.directory / "step-1.json").read_text())
    assert record == {
        "step": 1,
        "rank": 0,
        "not_finite": "the loss",
        "micro_batches": [{"prompts": [41], "share": 0.5, "loss": "nan"}],
    }
    tensors = load_file(world.directory / "step-1.safetensors")
    assert tensors["0.completion_ids"].tolist() == [[1, 7]] and tensors["0.advantages"].tolist() == [1.0]
    assert sorted(path.name for path in world.directory.iterdir()) == ["step-1.json", "step-1.safetensors"]


def test_of_a_gradient_all_micro_batches_are_kept(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(0.5, 0.25, gradient=math.nan)
    record = json.loads((world.directory / "step-1.json").read_text())
    assert record["not_finite"] == "the gradient norm"
    assert [entry["prompts"] for entry in record["micro_batches"]] == [[40], [41]]


def test_a_disk_that_refuses_costs_only_the_copy(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.directory.write_text("in the way")
    assert not world.run(math.nan)
    assert "could not be kept" in world.said[0]


def test_the_copies_are_bounded(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(25):
        world.run(math.nan)
        world.run(0.5)
    assert len(list(world.directory.glob("*.safetensors"))) == 20


def test_three_in_a_row_are_too_many(tmp_path: Path) -> None:
    world = World(tmp_path)
    for loss in (math.nan, math.nan, 0.5, math.nan, math.nan):
        world.run(loss)
        world.guard.require()
    control = TrainerControl()
    stop = StopWhenNotFinite(world.guard)
    stop.on_step_end(None, None, control)  # type: ignore[arg-type]
    assert not control.should_training_stop
    world.run(math.nan)
    with pytest.raises(NumericError, match="3 optimizer steps in a row") as problem:
        world.guard.require()
    assert (problem.value.code, problem.value.exit_code) == ("E-NUM-01", 8)
    assert "those after step 3" in problem.value.why
    stop.on_step_end(None, None, control)  # type: ignore[arg-type]
    assert control.should_training_stop and control.should_save and control.should_log


def test_weights_that_are_not_finite_cannot_be_mended_by_skipping(tmp_path: Path) -> None:
    world = World(tmp_path)
    with torch.no_grad():
        world.model.bias.fill_(math.nan)
    with pytest.raises(NumericError) as problem:
        world.run(math.nan)
    assert problem.value.code == "E-NUM-02" and "after step 0" in problem.value.what


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_skip_what_one_of_them_found(tmp_path: Path, rank: int) -> None:
    world = World(tmp_path, Ranks(1.0, rank=rank))
    before = world.state()
    assert not world.run(0.5)
    assert equal(world.state()[: len(before)], before)
    assert not world.directory.exists(), "who found nothing keeps nothing"
    assert [line.startswith("warning: step 1 is skipped: the loss of another") for line in world.said] == [True] * (
        rank == 0
    )


def test_a_rank_that_found_something_keeps_it_under_its_own_name(tmp_path: Path) -> None:
    world = World(tmp_path, Ranks(0.0, rank=1))
    assert not world.run(math.nan)
    assert (world.directory / "step-1.rank-1.safetensors").is_file()


def test_ranks_agree_on_the_gradient_too(tmp_path: Path) -> None:
    assert not World(tmp_path / "1", Ranks(0.0, 1.0)).run(0.5)
    assert World(tmp_path / "2", Ranks(0.0, 0.0)).run(0.5)


@pytest.mark.parametrize(("scale", "is_counted"), [(65536.0, False), (1.0, True)])
def test_an_overflow_of_scaled_gradients_is_the_scalers(tmp_path: Path, scale: float, is_counted: bool) -> None:
    world = World(tmp_path, Ranks(scaler=torch.amp.GradScaler("cpu", init_scale=scale)))
    for _ in range(3):
        assert not world.run(0.5, gradient=math.inf)
    assert (world.guard.fault is not None) == is_counted and len(world.said) == 3 * is_counted


def test_a_scaler_skips_the_step_itself(tmp_path: Path) -> None:
    """It refuses an optimizer without any gradient, and takes a step whose gradients look finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    world = World(tmp_path, Ranks(scaler=scaler))
    scaler.scale(torch.tensor(1.0))
    before = world.state()
    for parameter in world.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert not world.guard.admits(1, world.model, [micro_batch(0, math.nan)])
    scaler.unscale_(world.optimizer)
    nn.utils.clip_grad_norm_(world.model.parameters(), 1.0)
    scaler.step(world.optimizer)
    scaler.update()
    assert equal(world.state(), before) and scaler.get_scale() == 2.0
