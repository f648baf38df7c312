"""Starting vLLM: everything slow, and everything that starts processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from axolotl.errors import EnvironmentFault
from axolotl.serving.engines import process_tree
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.vllm_arguments import engine_arguments
from axolotl.serving.engines.vllm_environment import go_offline, local_model
from axolotl.serving.engines.vllm_requests import first_line
from axolotl.serving.fingerprint import fingerprint
from axolotl.serving.wire import Fingerprint

if TYPE_CHECKING:
    import psutil
    from vllm.v1.engine.async_llm import AsyncLLM

    from axolotl.serving.engines.vllm_stats import TokenCounter


@dataclass(frozen=True)
class Started:
    """processes: those that the engine started, to be gone when it is closed. counter: tokens
    computed so far. gpus: uuids of those that can receive weights, one a worker; none where that was not asked for."""

    llm: AsyncLLM
    counter: TokenCounter
    model_directory: Path
    fingerprint: Fingerprint
    processes: frozenset[psutil.Process]
    gpus: tuple[str, ...] = ()


def import_vllm() -> None:
    """The slow imports, in a call of their own: something keeps a traceback of them, frames and all. An engine made
    further down the same stack would stay alive with it and complain when the interpreter ends."""
    import vllm.engine.arg_utils
    import vllm.platforms
    import vllm.v1.engine.async_llm  # noqa: F401


def start(settings: EngineSettings) -> Started:
    """Fetch the model if need be, start the engine and wait for it. Raises `EnvironmentFault` with the reason."""
    directory = local_model(settings)
    identity = fingerprint(settings.model, settings.revision, settings.trust_remote_code)
    go_offline()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from axolotl.serving.engines.vllm_stats import TokenCounter, counting

    wanted = settings.device.partition(":")[0]
    if wanted != current_platform.device_type:
        raise EnvironmentFault(
            f"vllm.device: {settings.device}, but the installed vLLM runs on {current_platform.device_type}",
            code="E-ENV-03",
            do="install the vLLM build for this device, or set vllm.device or vllm.engine: transformers",
        )
    before = process_tree.children()
    counter = TokenCounter()
    try:
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_arguments(settings, directory)), stat_loggers=[counting(counter)]
        )
    except Exception as error:
        process_tree.stop(process_tree.children() - before)
        raise EnvironmentFault(
            f"the vLLM engine failed to start with {settings.model}",
            code="E-ENV-05",
            why=first_line(error),
            do="the engine's own log above has the details; vllm.engine: transformers is the way round it",
        ) from error
    gpus: tuple[str, ...] = ()
    if settings.weight_transfer:
        num_workers = settings.tensor_parallel_size * settings.data_parallel_size
        gpus = tuple(current_platform.get_device_uuid(index) for index in range(num_workers))
    return Started(llm, counter, Path(directory), identity, frozenset(process_tree.children() - before), gpus)
