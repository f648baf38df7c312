"""Servers that take weights and compute with others: each is caught before an optimizer step uses one completion.

The trainer is the real one, called in this process; the server is the real app over the transformers engine, in a
thread.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from axolotl.cli import train as train_command
from axolotl.cli.main import main
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.core.trainers.grpo.weight_sync import lora_files
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.wire import CANARY_VERSION
from tests.support.live_server import LiveServer, live_server
from tests.support.project import make_project, metrics
from tests.support.reference import load_reference, reference_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT, TOKENS = [5, 6, 7, 8], [40, 41, 42, 43, 44]


class LyingEngine(TransformersEngine):
    """The transformers engine, but for the version that a request is answered with."""

    def answers_with(self, version: int) -> int:
        return version

    async def score(self, prompts: Any, tokens: Any, temperature: float, adapter_version: int) -> list[list[float]]:
        return await super().score(prompts, tokens, temperature, self.answers_with(adapter_version))


class IgnoresAdapters(LyingEngine):
    def answers_with(self, version: int) -> int:
        return 0


class IgnoresAllButTheCanary(LyingEngine):
    def answers_with(self, version: int) -> int:
        return version if version == CANARY_VERSION else 0


class IsOneVersionLate(LyingEngine):
    """From the third version on, so that the one before is neither the base model nor gone."""

    def answers_with(self, version: int) -> int:
        return version - 1 if 3 <= version < CANARY_VERSION else version


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[AxolotlGRPOTrainer]:
    """The trainers that `main` builds."""
    built: list[AxolotlGRPOTrainer] = []
    build = train_command._build

    def noted(*args: Any) -> AxolotlGRPOTrainer:
        built.append(build(*args))
        return built[-1]

    monkeypatch.setattr(train_command, "_build", noted)
    return built


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_project(
        tmp_path,
        tiny_model,
        trl__use_vllm=True,
        trl__vllm_lora_sync=True,
        vllm__sync_dir=str(tmp_path / "sync"),
        max_steps=4,
    )
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def serve(project: Path, model: Path, engine: type[TransformersEngine] = TransformersEngine) -> Any:
    settings = EngineSettings(
        model=str(model),
        revision=None,
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_lora_rank=8,
        max_loras=3,
    )
    (project / "sync").mkdir(exist_ok=True)
    return live_server(project / "sync", functools.partial(engine.create, settings))


def run(server: LiveServer, *arguments: str) -> int:
    return main(["train", "config.yaml", "--vllm.port", server.url.rpartition(":")[2], *arguments])


def weights(trainer: AxolotlGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.policy().named_parameters() if value.requires_grad}


def assert_untrained(trainer: AxolotlGRPOTrainer) -> None:
    assert trainer.state.global_step == 0
    assert all(not value.any() for name, value in weights(trainer).items() if "lora_B" in name)


def test_the_base_model_behind_an_adapter_is_caught_by_the_canary(
    project: Path, tiny_model: Path, trained: list[AxolotlGRPOTrainer], capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(project, tiny_model, IgnoresAdapters) as server:
        assert run(server) == 7
    error = capsys.readouterr().err
    assert "E-SYN-11" in error and "the base model" in error and "log-prob of token" in error
    assert_untrained(trained[0])


def test_zeros_in_the_adapter_file_before_it_is_hashed_are_caught_by_the_canary(
    project: Path,
    tiny_model: Path,
    trained: list[AxolotlGRPOTrainer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def save_zeros(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        save_file({name: torch.zeros_like(value) for name, value in tensors.items()}, path, **more)

    monkeypatch.setattr(lora_files, "save_file", save_zeros)
    with serve(project, tiny_model) as server:
        assert run(server) == 7
    assert "E-SYN-11" in capsys.readouterr().err
    assert_untrained(trained[0])


def test_zeros_in_the_adapter_file_after_it_was_hashed_are_refused_by_the_server(
    project: Path,
    tiny_model: Path,
    trained: list[AxolotlGRPOTrainer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish = lora_files.publish

    def publish_and_swap(root: Path, version: int, *args: Any, **more: Any) -> str:
        digest = publish(root, version, *args, **more)
        path = root / f"v{version}" / "adapter_model.safetensors"
        zeros = {name: torch.zeros_like(value) for name, value in load_file(path).items()}
        save_file(zeros, path, metadata={"format": "pt"})
        return digest

    monkeypatch.setattr(lora_files, "publish", publish_and_swap)
    with serve(project, tiny_model) as server:
        assert run(server) == 7
    assert "E-SYN-02" in capsys.readouterr().err
    assert_untrained(trained[0])


@pytest.mark.parametrize(
    ("engine", "steps", "named"), [(IgnoresAllButTheCanary, 1, "the base model"), (IsOneVersionLate, 2, "version 2")]
)
def test_what_goes_wrong_later_ends_the_run_before_the_step_that_would_use_it(
    engine: type[TransformersEngine],
    steps: int,
    named: str,
    project: Path,
    tiny_model: Path,
    trained: list[AxolotlGRPOTrainer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve(project, tiny_model, engine) as server:
        assert run(server) == 7
    error = capsys.readouterr().err
    assert "E-SYN-11" in error and named in error
    assert trained[0].state.global_step == steps


def test_another_adapter_under_the_same_version_is_caught(
    project: Path,
    tiny_model: Path,
    trained: list[AxolotlGRPOTrainer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of another run, say: everything about it is valid, digest included."""

    def save_other(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        is_second = ".tmp-v2" in str(path)
        save_file({name: value.flip(0) if is_second else value for name, value in tensors.items()}, path, **more)

    monkeypatch.setattr(lora_files, "save_file", save_other)
    with serve(project, tiny_model) as server:
        assert run(server) == 7
    assert "E-SYN-11" in capsys.readouterr().err
    assert trained[0].state.global_step == 1


def test_a_run_that_goes_well_says_how_well(project: Path, tiny_model: Path) -> None:
    with serve(project, tiny_model) as server:
        assert run(server) == 0
    steps = metrics(project / "out")
    assert len(steps) == 4
    for step in steps:
        assert step["sync/logp_gap"] < 1e-5
        assert {"sync/save", "sync/load", "sync/check"} <= step.keys()
    assert "sync/canary" in steps[0] and "sync/canary" not in steps[1]
    assert steps[0]["sync/logp_distance"] == 0 and steps[1]["sync/logp_distance"] > 1e-4


def test_the_canary_leaves_no_trace_in_what_is_trained(project: Path, tiny_model: Path) -> None:
    """The same run in process, which needs no canary, has the same losses and weights."""
    with serve(project, tiny_model) as server:
        assert run(server, "--output_dir", "served", "--trl.vllm_importance_sampling_correction", "false") == 0
    assert (
        main(["train", "config.yaml", "--output_dir", "alone", "--trl.use_vllm=false", "--trl.vllm_lora_sync=false"])
        == 0
    )
    served, alone = (load_file(project / name / "adapter_model.safetensors") for name in ("served", "alone"))
    for name, value in alone.items():
        torch.testing.assert_close(served[name], value, atol=1e-4, rtol=1e-3)


def scored(server: LiveServer, version: int) -> list[float]:
    with server.client() as client:
        client.wait_ready()
        return client.score([PROMPT], [TOKENS], 1.0, version)[0]


@pytest.mark.parametrize(
    "options",
    [
        ["--adapter", "null"],
        ["--peft_use_dora", "true"],
        ["--lora_modules_to_save", "[norm]", "--lora_target_linear=false", "--lora_target_modules", "[q_proj,up_proj]"],
        ["--peft_init_lora_weights", "pissa"],
    ],
    ids=["full", "dora", "modules_to_save", "pissa"],
)
def test_all_the_weights_arrive_where_no_adapter_is_sent(
    options: list[str], project: Path, tiny_model: Path, trained: list[AxolotlGRPOTrainer]
) -> None:
    with serve(project, tiny_model) as server:
        assert run(server, "--trl.vllm_lora_sync=false", "--max_steps", "3", "--learning_rate", "5e-3", *options) == 0
        steps = metrics(project / "out")
        assert len(steps) == 3
        assert max(step["sync/logp_gap"] for step in steps) < 1e-4
        assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
        assert steps[-1]["sync/logp_distance"] > 1e-3
        served = scored(server, 4)
    policy = trained[0].policy().eval()
    assert served == pytest.approx(reference_logprobs(policy, PROMPT, TOKENS), abs=1e-3)
    base = reference_logprobs(load_reference(tiny_model), PROMPT, TOKENS)
    assert max(abs(a - b) for a, b in zip(served, base, strict=True)) > 1e-3
    # The run that is over holds nothing but the version that is served.
    (directory,) = (project / "sync" / "weights").glob("run-*/")
    assert [path.name for path in directory.iterdir()] == ["v4"]


def test_old_full_weights_are_caught(
    project: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine says that it has replaced its weights, and has not."""

    class KeepsItsWeights(TransformersEngine):
        async def load_weights(self, version: int, directory: Path) -> int:
            if version == 1:
                shutil.copytree(directory, project / "first")
                return await super().load_weights(version, directory)
            return await super().load_weights(version, project / "first")

    with serve(project, tiny_model, KeepsItsWeights) as server:
        assert run(server, "--trl.vllm_lora_sync=false", "--adapter", "null") == 7
    assert "E-SYN-11" in capsys.readouterr().err


@pytest.mark.parametrize("is_corrected", [True, False])
def test_the_kept_mass_makes_the_ratio_one(
    is_corrected: bool,
    project: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class KeepsItToItself(TransformersEngine):
        """As vLLM, which does not say what its filters kept."""

        async def generate(self, *args: Any) -> Any:
            async for group in super().generate(*args):
                silent = [item.model_copy(update={"log_kept": None}) for item in group.completions]
                yield group.model_copy(update={"completions": silent})

    engine = TransformersEngine if is_corrected else KeepsItToItself
    with serve(project, tiny_model, engine) as server:
        assert run(server, "--trl.top_p", "0.5", "--max_steps", "2") == 0
    error = capsys.readouterr().err
    means = [step["sampling/importance_sampling_ratio/mean"] for step in metrics(project / "out")]
    if is_corrected:
        assert means == pytest.approx([1.0, 1.0], abs=1e-3)
        assert "warning" not in error
    else:
        assert max(means) < 0.9
        assert error.count("the mean importance ratio is 0.") == 1
