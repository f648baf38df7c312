"""Servers that take weights and compute with others, whichever engine is behind them: inherit `SyncSuite` beside a
fixture `serve`. Each lie is caught before an optimizer step uses one completion.

The trainer is the real one, called in this process. `sync_project` is the directory it runs in, `trainers` what it
built.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from axolotl.cli.main import main
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.core.trainers.grpo.weight_sync import full_weights, lora_files
from axolotl.serving.wire import CANARY_VERSION
from tests.support.live_server import LiveServer
from tests.support.lying import (
    SAMPLES_WITH_THE_BASE_MODEL_AFTER_THE_CANARY,
    Lie,
    with_the_base_model,
    with_the_base_model_after_the_canary,
    with_the_one_before,
)
from tests.support.project import metrics

Serve = Callable[..., AbstractContextManager[LiveServer]]
Trainers = list[AxolotlGRPOTrainer]

FULL = ["--trl.vllm_lora_sync=false", "--adapter", "null"]


def train(server: LiveServer, *arguments: str) -> int:
    """Exit code of a run in the current directory on `server`."""
    return main(["train", "config.yaml", "--vllm.port", server.url.rpartition(":")[2], *arguments])


def assert_untrained(trainer: AxolotlGRPOTrainer) -> None:
    assert trainer.state.global_step == 0
    trained = [(name, value) for name, value in trainer.policy().named_parameters() if value.requires_grad]
    assert trained
    assert all(not value.detach().any() for name, value in trained if "lora_B" in name)


def saved_with(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], version: int) -> Any:
    """`save_file`, but for the files of one version: everything about them is valid, digest included."""

    def save(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        is_meant = f".tmp-v{version}" in str(path).split("/")
        save_file(change(tensors) if is_meant else tensors, path, **more)

    return save


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def another(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of another run, say."""
    return {name: value.flip(0).contiguous() for name, value in tensors.items()}


class SyncSuite:
    """Needs a fixture `serve`: `serve(lie)` is a server with `tiny_model` and the project's sync directory."""

    @pytest.mark.parametrize(
        "lie",
        [Lie.about(with_the_base_model), Lie(samples=with_the_base_model), Lie(scores=with_the_base_model)],
        ids=["always", "when it samples", "when it scores"],
    )
    @pytest.mark.parametrize("interval", ["1", "0"])
    def test_the_base_model_behind_an_adapter_is_caught_by_the_canary(
        self, lie: Lie, interval: str, serve: Serve, trainers: Trainers, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with serve(lie) as server:
            assert train(server, "--trl.sync_check_interval", interval) == 7
        error = capsys.readouterr().err
        assert "E-SYN-11" in error and "the base model" in error and "log-prob of token" in error
        assert_untrained(trainers[0])

    @pytest.mark.parametrize(("version", "steps"), [(CANARY_VERSION, 0), (2, 1)])
    @pytest.mark.parametrize("change", [zeros, another])
    def test_an_adapter_file_swapped_before_it_is_hashed_is_caught(
        self,
        version: int,
        steps: int,
        change: Any,
        serve: Serve,
        trainers: Trainers,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(lora_files, "save_file", saved_with(change, version))
        with serve() as server:
            assert train(server) == 7
        assert "E-SYN-11" in capsys.readouterr().err
        assert trainers[0].state.global_step == steps

    @pytest.mark.parametrize("options", [[], FULL], ids=["adapter", "full"])
    def test_files_swapped_after_they_were_hashed_are_refused_by_the_server(
        self,
        options: list[str],
        serve: Serve,
        trainers: Trainers,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for module in (lora_files, full_weights):
            publish: Any = module.publish

            def publish_and_swap(root: Path, version: int, *args: Any, publish: Any = publish, **more: Any) -> str:
                digest: str = publish(root, version, *args, **more)
                for path in (root / f"v{version}").glob("*.safetensors"):
                    save_file(zeros(load_file(path)), path, metadata={"format": "pt"})
                return digest

            monkeypatch.setattr(module, "publish", publish_and_swap)
        with serve() as server:
            assert train(server, *options) == 7
        assert "E-SYN-02" in capsys.readouterr().err
        assert_untrained(trainers[0])

    @pytest.mark.parametrize(
        ("answers", "steps", "named"),
        [(with_the_base_model_after_the_canary, 1, "the base model"), (with_the_one_before, 2, "version 2")],
    )
    def test_what_goes_wrong_later_ends_the_run_before_the_step_that_would_use_it(
        self,
        answers: Any,
        steps: int,
        named: str,
        serve: Serve,
        trainers: Trainers,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        with serve(Lie.about(answers)) as server:
            assert train(server) == 7
        error = capsys.readouterr().err
        assert "E-SYN-11" in error and named in error
        assert trainers[0].state.global_step == steps

    def test_completions_of_the_base_model_behind_honest_scores_are_caught(
        self, serve: Serve, trainers: Trainers, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with serve(SAMPLES_WITH_THE_BASE_MODEL_AFTER_THE_CANARY) as server:
            assert train(server) == 7
        assert "tokens that it sampled are another model's" in capsys.readouterr().err
        assert trainers[0].state.global_step == 1

    @pytest.mark.parametrize("interval", ["1", "0"])
    def test_full_weights_that_are_not_loaded_are_caught_by_the_canary(
        self,
        interval: str,
        serve: Serve,
        tiny_model: Path,
        trainers: Trainers,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The first ones of a run equal the base model: without the canary the first step would use them."""
        with serve(Lie(loads=lambda version, directory: tiny_model)) as server:
            assert train(server, *FULL, "--trl.sync_check_interval", interval) == 7
        error = capsys.readouterr().err
        assert "E-SYN-11" in error and "does not generate with the canary" in error and "the base model" in error
        assert_untrained(trainers[0])

    @pytest.mark.parametrize("change", [zeros, another])
    def test_full_weights_swapped_before_they_are_hashed_are_caught(
        self,
        change: Any,
        serve: Serve,
        trainers: Trainers,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(full_weights, "save_file", saved_with(change, CANARY_VERSION))
        with serve() as server:
            assert train(server, *FULL) == 7
        assert "E-SYN-11" in capsys.readouterr().err
        assert_untrained(trainers[0])

    def test_old_full_weights_are_caught(
        self, serve: Serve, sync_project: Path, trainers: Trainers, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The engine says that it has replaced its weights, and has not: one optimizer step changed nothing there."""

        def loads_the_first(version: int, directory: Path) -> Path:
            first = sync_project / "first"
            if version == 1:
                shutil.copytree(directory, first)
            return directory if version in (1, CANARY_VERSION) else first

        with serve(Lie(loads=loads_the_first)) as server:
            assert train(server, *FULL) == 7
        error = capsys.readouterr().err
        assert "E-SYN-11" in error and "policy version 2" in error
        assert trainers[0].state.global_step == 1

    @pytest.mark.parametrize("options", [[], FULL], ids=["adapter", "full"])
    def test_a_run_that_goes_well_says_how_well(self, options: list[str], serve: Serve, sync_project: Path) -> None:
        with serve() as server:
            assert train(server, *options) == 0
        steps = metrics(sync_project / "out")
        assert len(steps) == 4
        for step in steps:
            assert step["sync/logp_gap"] < 1e-4 and 0 < step["sync/logp_noise"] < 1e-4
            assert {"sync/save", "sync/load", "sync/check"} <= step.keys()
        assert "sync/canary" in steps[0] and "sync/canary" not in steps[1]
        assert steps[0]["sync/logp_distance"] < 1e-4 < steps[1]["sync/logp_distance"]

    @pytest.mark.parametrize("options", [[], FULL], ids=["adapter", "full"])
    def test_a_step_that_changes_nothing_is_no_error(
        self, options: list[str], serve: Serve, sync_project: Path
    ) -> None:
        with serve() as server:
            assert train(server, *options, "--learning_rate", "0", "--max_steps", "2") == 0
        assert [step["sync/logp_distance"] for step in metrics(sync_project / "out")] == pytest.approx([0, 0], abs=1e-4)
