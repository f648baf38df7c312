"""How full weights get to the server: `trl.weight_sync` against what both sides have."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from axolotl.errors import ConfigError
from axolotl.serving.wire import ServerInfo, WeightTransport


@dataclass(frozen=True)
class TrainerSide:
    """gpu: uuid of the GPU that the model is on, empty without one. has_vllm: vLLM can be imported here; its half of a
    transfer is used."""

    device: str
    gpu: str
    has_vllm: bool


def trainer_side(device: str) -> TrainerSide:
    """Of this process, which trains on `device`."""
    is_cuda = torch.device(device).type == "cuda"
    return TrainerSide(
        device=device,
        gpu=str(torch.cuda.get_device_properties(torch.device(device)).uuid) if is_cuda else "",
        has_vllm=importlib.util.find_spec("vllm") is not None,
    )


def choose_transport(
    wanted: Literal["auto", "files", "nccl"], info: ServerInfo, trainer: TrainerSide
) -> WeightTransport:
    """`auto` is NCCL where both sides can.

    Raises:
        ConfigError: `E-CFG-23` NCCL is asked for and not possible.
    """
    if wanted == "files":
        return "files"
    why = obstacle(info, trainer)
    if why is None:
        return "nccl"
    if wanted == "auto":
        return "files"
    raise ConfigError(
        "trl.weight_sync: nccl is not possible here",
        code="E-CFG-23",
        why=why,
        do="set trl.weight_sync: auto, or files",
    )


def obstacle(info: ServerInfo, trainer: TrainerSide) -> str | None:
    """Why NCCL is not possible between the two, None when nothing is known against it."""
    if torch.device(trainer.device).type != "cuda":
        return f"the trainer is on {trainer.device}, and NCCL connects GPUs"
    if not trainer.has_vllm:
        return "vLLM is not installed where the trainer runs (pip install 'axolotl[vllm]')"
    if not info.device.startswith("cuda"):
        return f"the server is on {info.device}, and NCCL connects GPUs"
    if "nccl" not in info.weight_transports:
        return f"the server ({info.engine}) was started with a config that does not send full weights over NCCL"
    if _plain(trainer.gpu) in {_plain(rank) for rank in info.weight_ranks}:
        return f"trainer and server share GPU {trainer.gpu}, and NCCL connects different ones"
    return None


def _plain(uuid: str) -> str:
    """The driver puts `GPU-` before it, PyTorch does not."""
    return uuid.lower().removeprefix("gpu-")
