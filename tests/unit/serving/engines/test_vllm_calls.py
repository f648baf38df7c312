"""Control calls of vLLM under load: they wait as long as the engine is at work, and no longer."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from axolotl.errors import ServerError
from axolotl.serving.engines import process_tree, vllm_calls
from axolotl.serving.engines.vllm_calls import Calls

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

STALL_S = 0.1
NUM_LOOKS = 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_calls, "ALIVE_CHECK_S", 0.01)


def calls(work: Callable[[], int]) -> Calls:
    llm = SimpleNamespace(errored=False, engine_core=SimpleNamespace(resources=SimpleNamespace(engine_dead=False)))
    return Calls(llm, frozenset(), work, stall_s=STALL_S)  # type: ignore[arg-type]


class Growing:
    """A number that grows whenever somebody looks; `seen` is set once they have looked often."""

    def __init__(self) -> None:
        self.looks = 0
        self.seen = asyncio.Event()

    def __call__(self, *_: object) -> int:
        self.looks += 1
        if self.looks == NUM_LOOKS:
            self.seen.set()
        return self.looks


async def after(event: asyncio.Event) -> str:
    await event.wait()
    return "done"


def test_a_call_waits_while_tokens_are_made() -> None:
    async def main() -> None:
        tokens = Growing()
        began = asyncio.get_running_loop().time()
        assert await calls(tokens).control(after(tokens.seen)) == "done"
        assert asyncio.get_running_loop().time() - began > 2 * STALL_S

    asyncio.run(main())


def test_an_engine_that_makes_none_hangs() -> None:
    async def main() -> None:
        with pytest.raises(ServerError, match="did not answer") as problem:
            await calls(lambda: 7).control(after(asyncio.Event()))
        assert problem.value.code == "E-SRV-05"

    asyncio.run(main())


def test_a_reload_at_work_is_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        seconds = Growing()
        monkeypatch.setattr(process_tree, "cpu_seconds", seconds)
        under_test = calls(lambda: 7)
        assert await under_test.reload(after(seconds.seen), timeout_s=20) == "done"
        assert under_test.reloading == NUM_LOOKS - 1

    asyncio.run(main())


def test_a_reload_that_does_nothing_reports_nothing_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(process_tree, "cpu_seconds", lambda _: 1.0)
        under_test = calls(lambda: 7)
        with pytest.raises(ServerError, match="did not answer"):
            await under_test.reload(after(asyncio.Event()), timeout_s=STALL_S)
        assert under_test.reloading == 0

    asyncio.run(main())
