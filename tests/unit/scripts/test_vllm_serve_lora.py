from __future__ import annotations

import pytest

from axolotl.errors import ConfigError, EnvironmentFault
from axolotl.scripts.vllm_serve_lora import share_cores, start_failure


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
