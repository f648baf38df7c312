"""Claims of a server, as they go over the wire."""

from __future__ import annotations

import os
from typing import Any

from axolotl.serving.processes import own_namespace
from tests.fakes.engine import FAKE_FINGERPRINT


def claim_of_this_process(run_id: str) -> dict[str, Any]:
    """Another claim of this process takes the server away from this one."""
    process = {"host": "elsewhere", "pid": os.getpid(), "namespace": own_namespace()}
    return {"run_id": run_id, **process, "fingerprint": FAKE_FINGERPRINT.model_dump()}
