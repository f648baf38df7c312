"""The adapter slots over a fake of vLLM's calls: nothing stays in the engine unnoticed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from axolotl.errors import ServerError
from axolotl.serving.engines.protocol import EngineRejects
from tests.support.tiny_model import make_random_adapter, make_tiny_model

pytest.importorskip("vllm", reason="vLLM is not installed; on a CPU: make install-vllm")

from axolotl.serving.engines.vllm_adapters import AdapterSlots


class FakeLLM:
    """held: ids that the engine has. faults: raised, one a call, by the calls of that name."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.faults: dict[str, list[Exception]] = {}

    def _maybe_fail(self, name: str) -> None:
        if self.faults.get(name):
            raise self.faults[name].pop(0)

    async def add_lora(self, request: Any) -> bool:
        self.held.add(request.lora_int_id)
        self._maybe_fail("add")
        return True

    async def remove_lora(self, version: int) -> bool:
        self._maybe_fail("remove")
        self.held.discard(version)
        return True

    async def collective_rpc(self, name: str, args: tuple[int, ...]) -> list[list[str]]:
        return [[]]


class Calls:
    async def control(self, call: Any) -> Any:
        return await call


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("slots")
    return make_random_adapter(make_tiny_model(root / "model"), root / "adapter", rank=8, seed=1)


def make_slots(llm: FakeLLM) -> AdapterSlots:
    return AdapterSlots(llm, Calls(), {}, max_rank=8, num_slots=2)  # type: ignore[arg-type]


def test_an_unload_that_fails_leaves_the_version_held(adapter: Path) -> None:
    llm = FakeLLM()
    slots = make_slots(llm)
    asyncio.run(slots.load(1, adapter))
    llm.faults["remove"] = [ServerError("no answer")]
    with pytest.raises(ServerError):
        asyncio.run(slots.unload(1))
    assert slots.versions == [1] and llm.held == {1}
    asyncio.run(slots.unload(1))
    assert slots.versions == [] and llm.held == set()


@pytest.mark.parametrize("fault", [ServerError("no answer"), EngineRejects("bad tensors")], ids=["lost", "refused"])
def test_a_load_that_fails_leaves_nothing_in_the_engine(fault: Exception, adapter: Path) -> None:
    llm = FakeLLM()
    slots = make_slots(llm)
    llm.faults["add"] = [fault]
    with pytest.raises(type(fault)):
        asyncio.run(slots.load(1, adapter))
    assert slots.versions == [] and llm.held == set()


def test_a_load_whose_outcome_is_unknown_is_not_loaded_again(adapter: Path) -> None:
    """vLLM would keep the weights it has under that id."""
    llm = FakeLLM()
    slots = make_slots(llm)
    llm.faults = {"add": [ServerError("no answer")], "remove": [ServerError("no answer")]}
    with pytest.raises(ServerError):
        asyncio.run(slots.load(1, adapter))
    with pytest.raises(EngineRejects, match="already loaded"):
        asyncio.run(slots.load(1, adapter))
    asyncio.run(slots.unload_all())
    assert llm.held == set()
