"""`axolotl vllm-serve config.yaml`."""

from __future__ import annotations

import importlib.util
import os
import sys

from axolotl.cli.config import LoadedConfig, dump_config
from axolotl.errors import EnvironmentFault
from axolotl.utils.schemas.plan import sync_dir

OUR_MODULE = "axolotl.scripts.vllm_serve_lora"


def run(loaded: LoadedConfig) -> None:
    """Serve until stopped; with another `vllm.serve_module`, become `python -m <module> <resolved config>`.

    Such a module gets the resolved config as a file in `vllm.sync_dir`; the trainer's protocol check tells whether
    what it serves can be used.
    """
    module = loaded.config.vllm.serve_module
    if module in (None, OUR_MODULE):
        from axolotl.scripts.vllm_serve_lora import main

        main(loaded.config, loaded.path.parent)
        return
    assert module is not None
    _check_exists(module)
    directory = sync_dir(loaded.config)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    resolved = directory / "config.yaml"
    resolved.write_text(dump_config(loaded.config))
    print(f"vllm.serve_module: running python -m {module} {resolved}", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", module, str(resolved)])


def _check_exists(module: str) -> None:
    try:
        is_found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_found = False
    if not is_found:
        raise EnvironmentFault(
            f"vllm.serve_module: there is no module {module}",
            code="E-ENV-07",
            do="install it, or leave serve_module out to run the server that comes with this program",
        )
