"""The engine over a vLLM that is scripted: what it asks of vLLM and in which order, and how it takes failures."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from axolotl.errors import ServerError
from axolotl.serving.engines.protocol import EngineProgress, EngineRejects, EngineSettings
from axolotl.serving.engines.vllm import VLLMEngine
from axolotl.serving.engines.vllm_start import Started
from axolotl.serving.wire import Fingerprint, Sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

FINGERPRINT = Fingerprint(base_model="m", config="c", tokenizer="t", weights="w", summary={})
TWO = Sampling(n=2, max_tokens=4)


class ScriptedLLM:
    """calls: what was asked of it, in order. Each request waits for the event of its prompt's first token, if there is
    one in `gates`. `broken`: the call that fails."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(
            max_model_len=64, get_vocab_size=lambda: 100, hf_text_config=SimpleNamespace(tie_word_embeddings=False)
        )
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))
        self.errored = False
        self.output_handler = asyncio.ensure_future(asyncio.Event().wait())
        self.calls: list[str] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.running: dict[str, asyncio.Future[str]] = {}
        self.broken = ""
        self.caches_cleared = True

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        first = prompt["prompt_token_ids"][0]
        self.calls.append(f"generate {first}")
        aborted = self.running[request_id] = asyncio.get_running_loop().create_future()
        try:
            reason = "length"
            if first in self.gates:
                gate = asyncio.ensure_future(self.gates[first].wait())
                await asyncio.wait({gate, aborted}, return_when=asyncio.FIRST_COMPLETED)
                reason = "abort" if aborted.done() else "length"
        except asyncio.CancelledError:
            self.calls.append(f"cancelled {first}")
            raise
        finally:
            del self.running[request_id]
        flat = SimpleNamespace(logprobs=[-1.0])
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[first], logprobs=flat, finish_reason=reason)])

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running[request_id].set_result("abort")

    async def pause_generation(self, *, mode: str) -> None:
        self._call(f"pause {mode}")

    async def collective_rpc(self, method: str, *, kwargs: dict[str, str] | None = None) -> None:
        self._call(" ".join([method, *(Path(path).name for path in (kwargs or {}).values())]))

    async def reset_prefix_cache(self) -> bool:
        self._call("clear caches")
        return self.caches_cleared

    async def resume_generation(self) -> None:
        self._call("resume")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.broken and name.startswith(self.broken):
            raise Exception("Worker failed with error '/secret/v3 is unreadable', please check the stack trace above")


def weights(directory: Path, rows: int = 4) -> Path:
    directory.mkdir()
    save_file({"model.norm.weight": torch.zeros(rows)}, directory / "model.safetensors")
    return directory


Scenario = Callable[[VLLMEngine, ScriptedLLM], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with an engine over a scripted vLLM, whose base model is in `tmp_path/base`."""
    base = weights(tmp_path / "base")
    settings = EngineSettings(
        model=str(base),
        revision=None,
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_lora_rank=8,
        max_loras=2,
    )

    async def main(scenario: Scenario) -> None:
        llm = ScriptedLLM()
        counter = SimpleNamespace(prompt=7, generated=3)
        with ThreadPoolExecutor(1) as starter:
            started = Started(llm, counter, base, FINGERPRINT, frozenset())
            try:
                async with asyncio.timeout(20):
                    await scenario(VLLMEngine(started, settings, starter), llm)
            finally:
                llm.output_handler.cancel()

    return lambda scenario: asyncio.run(main(scenario))


def test_a_group_comes_when_it_is_finished(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        llm.gates[5] = asyncio.Event()
        stream = engine.generate([[5], [6]], TWO, [[1, 2], [3, 4]], 0)
        first = await anext(stream)
        assert (first.index, [completion.ids for completion in first.completions]) == (1, [[6], [6]])
        llm.gates[5].set()
        assert [group.index async for group in stream] == [0]

    play(scenario)


def test_closing_the_stream_ends_the_rest_in_the_engine(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        llm.gates[5] = asyncio.Event()
        async with aclosing(engine.generate([[5], [6]], TWO, [[1, 2], [3, 4]], 0)) as stream:
            await anext(stream)
            assert len(llm.running) == 2
        assert llm.calls[-2:] == ["cancelled 5", "cancelled 5"] and not llm.running

    play(scenario)


def test_a_reset_reaches_requests_that_have_not_begun(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        stream = engine.generate([[5]], TWO, [[1, 2]], 0)
        asked = asyncio.ensure_future(anext(stream))
        await asyncio.wait({asked}, timeout=0)
        await engine.reset()
        with pytest.raises(ServerError, match="gave up a request"):
            await asked
        assert llm.calls == ["clear caches"]

    play(scenario)


def test_weights_are_replaced_between_requests(play: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        llm.gates[5] = asyncio.Event()
        before = asyncio.ensure_future(anext(engine.generate([[5]], TWO, [[1, 2]], 0)))
        while not llm.calls:
            await asyncio.wait({before}, timeout=0)
        loading = asyncio.ensure_future(engine.load_weights(3, weights(tmp_path / "v3")))
        while engine._traffic._open.is_set():
            await asyncio.wait({loading}, timeout=0.01)
        late = asyncio.ensure_future(anext(engine.generate([[6]], TWO, [[1, 2]], 0)))
        after = asyncio.ensure_future(anext(engine.generate([[7]], TWO, [[1, 2]], 3)))
        await asyncio.wait({late, after}, timeout=0.05)
        llm.gates[5].set()
        assert (await before).completions[0].ids == [5]
        assert await loading == 1
        with pytest.raises(EngineRejects, match=r"version 0 is not loaded; loaded: \[3\]"):
            await late
        assert (await after).completions[0].ids == [7]
        assert llm.calls == [
            "generate 5",
            "generate 5",
            "pause wait",
            "reload_weights v3",
            "axolotl_repack_output",
            "clear caches",
            "resume",
            "generate 7",
            "generate 7",
        ]

    play(scenario)


def test_a_reset_brings_the_base_models_weights_back(play: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        await engine.load_weights(3, weights(tmp_path / "v3"))
        with pytest.raises(EngineRejects, match="full weights"):
            await engine.load_adapter(4, tmp_path)
        llm.calls.clear()
        await engine.reset()
        assert llm.calls == ["pause wait", "reload_weights base", "axolotl_repack_output", "clear caches", "resume"]
        assert (await anext(engine.generate([[5]], TWO, [[1, 2]], 0))).completions[0].ids == [5]

    play(scenario)


def test_weights_that_do_not_fit_change_nothing(play: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        with pytest.raises(EngineRejects, match=r"has shape \[5\]"):
            await engine.load_weights(3, weights(tmp_path / "v3", rows=5))
        assert llm.calls == []
        assert (await anext(engine.generate([[5]], TWO, [[1, 2]], 0))).completions[0].ids == [5]

    play(scenario)


@pytest.mark.parametrize("broken", ["pause", "reload_weights", "axolotl_repack_output", "clear caches", "resume"])
def test_a_failed_reload_is_the_engines_end(play: Callable[[Scenario], None], tmp_path: Path, broken: str) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        llm.broken = broken
        death = asyncio.ensure_future(engine.died())
        await asyncio.wait({death}, timeout=0)
        with pytest.raises(ServerError, match="failed to replace its weights") as caught:
            await engine.load_weights(3, weights(tmp_path / "v3"))
        assert caught.value.code == "E-SRV-23" and "unreadable" in caught.value.why
        assert "unreadable" in await death
        for version in (0, 3):
            with pytest.raises((ServerError, EngineRejects)):
                await anext(engine.generate([[5]], TWO, [[1, 2]], version))
        with pytest.raises(ServerError, match="failed to replace"):
            await engine.reset()

    play(scenario)


def test_caches_that_stay_are_a_failed_reload(play: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        llm.caches_cleared = False
        with pytest.raises(ServerError) as caught:
            await engine.load_weights(3, weights(tmp_path / "v3"))
        assert caught.value.code == "E-SRV-23" and "prefix cache" in caught.value.why

    play(scenario)


def test_the_end_of_vllms_reader_is_the_engines_death(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        death = asyncio.ensure_future(engine.died())
        await asyncio.wait({death}, timeout=0)
        assert not death.done()
        llm.output_handler.cancel()
        assert await death == "vLLM stopped reading from its engine"

    play(scenario)


def test_progress_is_the_counters(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.progress() == EngineProgress(work=10, generated=3)
        engine._calls.reloading = 2
        assert engine.progress() == EngineProgress(work=12, generated=3)

    play(scenario)
