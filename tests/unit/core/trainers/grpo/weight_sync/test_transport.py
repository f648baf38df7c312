from typing import Any

import pytest

from axolotl.core.trainers.grpo.weight_sync.transport import TrainerSide, choose_transport, trainer_side
from axolotl.errors import ConfigError
from axolotl.serving.wire import ServerInfo
from tests.support.scripted_http import INFO

TRAINER = TrainerSide(device="cuda", gpu="aaaa-1", has_vllm=True)
SERVER = INFO.model_copy(
    update={
        "engine": "vllm",
        "device": "cuda",
        "weight_transports": ["files", "nccl"],
        "weight_ranks": ["GPU-bbbb-2", "GPU-cccc-3"],
    }
)


def changed(one: Any, **values: Any) -> Any:
    return one.model_copy(update=values) if isinstance(one, ServerInfo) else TrainerSide(**{**vars(one), **values})


@pytest.mark.parametrize(("wanted", "got"), [("auto", "nccl"), ("nccl", "nccl"), ("files", "files")])
def test_with_two_gpus_it_is_as_wanted(wanted: Any, got: str) -> None:
    assert choose_transport(wanted, SERVER, TRAINER) == got


@pytest.mark.parametrize(
    ("server", "trainer", "why"),
    [
        (SERVER, changed(TRAINER, device="cpu", gpu=""), "the trainer is on cpu"),
        (SERVER, changed(TRAINER, has_vllm=False), "vLLM is not installed where the trainer runs"),
        (changed(SERVER, device="cpu", weight_ranks=[]), TRAINER, "the server is on cpu"),
        (changed(SERVER, weight_transports=["files"], weight_ranks=[]), TRAINER, "was started with a config"),
        (SERVER, changed(TRAINER, gpu="cccc-3"), "share GPU cccc-3"),
    ],
)
def test_what_is_missing_on_either_side_means_files_or_one_error(
    server: ServerInfo, trainer: TrainerSide, why: str
) -> None:
    assert choose_transport("auto", server, trainer) == "files"
    assert choose_transport("files", server, trainer) == "files"
    with pytest.raises(ConfigError) as caught:
        choose_transport("nccl", server, trainer)
    assert (caught.value.code, caught.value.exit_code) == ("E-CFG-23", 2)
    assert why in caught.value.why and caught.value.do


def test_a_process_without_a_gpu_has_none() -> None:
    side = trainer_side("cpu")
    assert (side.device, side.gpu) == ("cpu", "")
