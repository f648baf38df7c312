from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from axolotl.errors import ConfigError, EnvironmentFault
from axolotl.scripts.vllm_serve_lora import end_of, share_cores, start_failure
from axolotl.serving.app import ServerState
from tests.fakes.engine import FakeEngine


@pytest.mark.parametrize(
    ("engine", "before", "after"),
    [
        ("auto", {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ("transformers", {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ("vllm", {}, {}),
    ],
)
def test_idle_threads_sleep_unless_the_user_or_vllm_decides(
    engine: str, before: dict[str, str], after: dict[str, str]
) -> None:
    share_cores(engine, before)
    assert before == after


def test_whatever_stops_the_engine_is_one_line() -> None:
    failure = start_failure(OSError("no weights\nand much more"))
    assert isinstance(failure, EnvironmentFault)
    assert (failure.code, failure.why) == ("E-ENV-05", "OSError: no weights")
    assert start_failure(ValueError()).why == "ValueError: no message"
    ours = ConfigError("vllm.max_model_len is too large")
    assert start_failure(ours) is ours


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_end_of_an_engine_has_its_reason(tmp_path: Path, is_broken: bool) -> None:
    """The engine says that it died, or the app has found it broken."""

    async def run() -> str:
        engine = FakeEngine()
        state = ServerState(instance_id="i", token="t", sync_dir=tmp_path, max_held=3)
        state.ready(engine)
        end = asyncio.ensure_future(end_of(engine, state))
        while engine.death is None:
            await asyncio.sleep(0)
        assert not end.done()
        if is_broken:
            state.failed("the weights are nobody's")
        else:
            engine.death.set_result("killed by signal 9")
        return await asyncio.wait_for(end, 10)

    assert asyncio.run(run()) == ("the weights are nobody's" if is_broken else "killed by signal 9")
