"""Runs whose full weights go over a fake NCCL, from the command line to the last step: the trainer in this process, the
server's app with the transformers engine in a thread, which takes what it receives as if it were vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from axolotl.cli.main import main
from axolotl.core.trainers.grpo import assembly
from axolotl.core.trainers.grpo.weight_sync.nccl import NcclSender
from axolotl.core.trainers.grpo.weight_sync.transport import TrainerSide
from axolotl.serving.engines.protocol import Engine, EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.wire import CANARY_VERSION, TensorLayout
from tests.fakes.nccl import FakeNccl
from tests.fakes.receiver import FakeReceiver
from tests.support.live_server import LiveServer, live_server
from tests.support.project import make_project, metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]


class LoadingReceiver(FakeReceiver):
    """Has the engine load what came, after `change`."""

    def __init__(self, nccl: FakeNccl, engine: TransformersEngine, directory: Path, change: Change) -> None:
        super().__init__(nccl)
        self._engine = engine
        self._directory = directory
        self._change = change

    async def receive(self, version: int, tensors: Sequence[TensorLayout]) -> int:
        await super().receive(version, tensors)
        directory = self._directory / f"received-{version}"
        directory.mkdir()
        save_file(self._change(self.received[version]), directory / "model.safetensors")
        return await self._engine.load_weights(version, directory)


class GpuEngine:
    """The transformers engine, but for what it says of itself and its receiver."""

    device = "cuda"
    weight_transports = ("files", "nccl")

    def __init__(self, engine: TransformersEngine, receiver: LoadingReceiver) -> None:
        self._engine = engine
        self.receiver = receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def reset(self) -> None:
        self.receiver.unlink()
        await self._engine.reset()


class World:
    """receivers: those of the servers that were started."""

    def __init__(self, directory: Path, model: Path, nccl: FakeNccl) -> None:
        self.directory = directory
        self.nccl = nccl
        self.receivers: list[LoadingReceiver] = []
        self._model = model

    def serve(self, change: Change = lambda tensors: tensors) -> Any:
        async def create() -> Engine:
            engine = await TransformersEngine.create(
                EngineSettings(
                    model=str(self._model),
                    revision=None,
                    device="cpu",
                    dtype="float32",
                    max_model_len=128,
                    max_lora_rank=0,
                    max_loras=3,
                )
            )
            self.receivers.append(LoadingReceiver(self.nccl, engine, self.directory, change))
            on_gpu: Any = GpuEngine(engine, self.receivers[-1])
            return on_gpu  # type: ignore[no-any-return]

        return live_server(self.directory / "sync", create)

    def train(self, server: LiveServer, *arguments: str) -> int:
        return main(["train", "config.yaml", "--vllm.port", server.url.rpartition(":")[2], *arguments])


@pytest.fixture
def world(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_project(
        tmp_path,
        tiny_model,
        adapter=None,
        trl__use_vllm=True,
        trl__weight_sync="nccl",
        vllm__sync_dir=str(tmp_path / "sync"),
        max_steps=3,
    )
    (tmp_path / "sync").mkdir()
    nccl = FakeNccl()
    monkeypatch.setattr(assembly, "trainer_side", lambda device: TrainerSide("cuda", "GPU-2222", has_vllm=True))
    monkeypatch.setattr(assembly, "NcclSender", lambda device: NcclSender(device, nccl.library))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield World(tmp_path, tiny_model, nccl)
    torch.set_num_threads(threads)
    nccl.leave_waiting()
    for communicator in nccl.communicators:
        communicator.destroy()


@pytest.mark.parametrize("options", [[], ["--adapter", "lora"], ["--trl.weight_sync", "auto"]])
def test_every_step_is_served_and_proved_without_a_file(world: World, options: list[str]) -> None:
    with world.serve() as server:
        assert world.train(server, *options) == 0
        (receiver,) = world.receivers
        assert list(receiver.received) == [CANARY_VERSION, 1, 2, 3, 4]
        assert list((world.directory / "sync" / "weights").glob("*/v*")) == []
    steps = metrics(world.directory / "out")
    assert len(steps) == 3 and all(step["sync/logp_gap"] < 1e-4 for step in steps)
    assert steps[0]["sync/logp_distance"] < 1e-4 < steps[1]["sync/logp_distance"], "one step changes the server"


def test_the_same_run_over_files_has_the_same_losses(world: World) -> None:
    losses = []
    for number, transport in enumerate(("nccl", "files")):
        with world.serve() as server:
            arguments = ("--trl.weight_sync", transport, "--output_dir", f"out-{number}")
            assert world.train(server, *arguments) == 0
        losses.append([step["loss"] for step in metrics(world.directory / f"out-{number}")])
        for directory in world.directory.glob("received-*"):
            directory.rename(world.directory / f"{number}-{directory.name}")
    assert losses[0] == losses[1]
    assert not world.receivers[1].received


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
        lambda tensors: {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()},
    ],
    ids=["zeros", "another"],
)
def test_weights_that_arrive_as_others_are_caught_before_a_step(
    world: World, change: Change, capsys: pytest.CaptureFixture[str]
) -> None:
    """Count, names, shapes and digest are all as they were announced."""
    with world.serve(change) as server:
        assert world.train(server) == 7
    assert "E-SYN-11" in capsys.readouterr().err
    assert not (world.directory / "out" / "model.safetensors").exists()


def test_a_link_that_cannot_be_made_ends_the_run_before_it_begins(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.nccl.join_fault = RuntimeError("NCCL error: unhandled cuda error")
    with world.serve() as server:
        assert world.train(server) == 7
    error = capsys.readouterr().err
    assert "E-SYN-14" in error and "unhandled cuda error" in error


def test_without_a_gpu_nccl_is_one_error_and_auto_is_files(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(assembly, "trainer_side", lambda device: TrainerSide("cpu", "", has_vllm=True))
    with world.serve() as server:
        assert world.train(server) == 2
        error = capsys.readouterr().err
        assert "E-CFG-23" in error and "the trainer is on cpu" in error
        assert world.train(server, "--trl.weight_sync", "auto", "--overwrite") == 0
    assert not world.receivers[0].received
