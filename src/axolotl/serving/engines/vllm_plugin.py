"""A vLLM general plugin that ties every engine process to the life of the process that started it.

vLLM's engine core does not watch its parent: when the server is killed, engine and workers stay behind with their
memory. Named by the entry point `vllm.general_plugins`, `register` runs at the start of every vLLM process and asks
the kernel to kill that process when its parent goes away. The signal comes when the *thread* that started the process
ends, so an engine has to be started from a thread that lives as long as it does.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

PLUGIN_NAME = "axolotl_parent_death"

PR_SET_PDEATHSIG = 1


def register() -> None:
    """Ask for SIGKILL at the parent's death. Does nothing in the server process itself, nor outside Linux."""
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent.pid:
        # The parent died before the request took effect: no signal will ever come.
        os._exit(1)
