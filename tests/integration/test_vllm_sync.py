"""The proof of sync over vLLM, with the trainer and the server's app in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.integration.conftest import serve_on_loop
from tests.support.lying import HONEST, Lie, LyingEngine
from tests.support.running_engine import RunningEngine
from tests.support.sync_suite import Serve, SyncSuite

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

torch.set_num_threads(1)


@pytest.fixture
def serve(sync_project: Path, vllm_engine: RunningEngine) -> Serve:
    def serve(lie: Lie = HONEST) -> Any:
        liar = cast(Any, LyingEngine(vllm_engine.engine, lie))
        return serve_on_loop(RunningEngine(liar, vllm_engine.loop, vllm_engine.settings), sync_project / "sync")

    return serve


class TestVLLMSync(SyncSuite):
    pass
