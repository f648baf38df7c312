"""Weights over NCCL in the vLLM engine, over a vLLM that is scripted: what its workers are asked, and what a failure
leaves."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from axolotl.errors import ServerError
from axolotl.serving.engines.protocol import EngineRejects, EngineSettings
from axolotl.serving.engines.vllm import VLLMEngine
from axolotl.serving.engines.vllm_arguments import engine_arguments
from axolotl.serving.engines.vllm_start import Started
from axolotl.serving.engines.vllm_transfer import link_info, update_info
from axolotl.serving.wire import Fingerprint, Sampling, TensorLayout

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

FINGERPRINT = Fingerprint(base_model="m", config="c", tokenizer="t", weights="w", summary={})
UNIQUE_ID = base64.b64encode(bytes(range(128))).decode()
EMBEDDING = TensorLayout(name="model.embed_tokens.weight", dtype="float32", shape=[4, 2])
NORM = TensorLayout(name="model.norm.weight", dtype="bfloat16", shape=[2])
HEAD = TensorLayout(name="lm_head.weight", dtype="float32", shape=[4, 2])
REPLACED = ["pause wait", "start", "update", "finish", "axolotl_repack_output", "clear caches", "resume"]


class ScriptedLLM:
    """calls: what was asked of it, in order. broken: the call that fails in a worker; stuck: the one that never
    answers. linked, updated: what the workers were told."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(
            max_model_len=64, get_vocab_size=lambda: 100, hf_text_config=SimpleNamespace(tie_word_embeddings=True)
        )
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))
        self.errored = False
        self.output_handler = asyncio.ensure_future(asyncio.Event().wait())
        self.calls: list[str] = []
        self.broken = self.stuck = ""
        self.asked = asyncio.Event()
        self.linked: dict[str, Any] = {}
        self.updated: dict[str, Any] = {}

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.linked = request.init_info
        await self._call("link")

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._call("unlink")

    async def start_weight_update(self) -> None:
        await self._call("start")

    async def update_weights(self, request: Any) -> None:
        self.updated = request.update_info
        await self._call("update")

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._call("finish")

    async def pause_generation(self, *, mode: str) -> None:
        await self._call(f"pause {mode}")

    async def collective_rpc(self, method: str, *, kwargs: dict[str, str] | None = None) -> None:
        await self._call(" ".join([method, *(Path(path).name for path in (kwargs or {}).values())]))

    async def reset_prefix_cache(self) -> bool:
        await self._call("clear caches")
        return True

    async def resume_generation(self) -> None:
        await self._call("resume")

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise Exception("Worker failed with error 'NCCL error: invalid usage', please check the stack trace above")
        if name == self.stuck:
            self.asked.set()
            await asyncio.Event().wait()


Scenario = Callable[[VLLMEngine, ScriptedLLM], Coroutine[Any, Any, None]]
Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    base = tmp_path / "base"
    base.mkdir()
    tensors = {EMBEDDING.name: torch.zeros(4, 2), NORM.name: torch.zeros(2)}
    save_file(tensors, base / "model.safetensors")
    settings = engine_settings(str(base))

    async def main(scenario: Scenario, gpus: tuple[str, ...]) -> None:
        llm = ScriptedLLM()
        counter: Any = SimpleNamespace(prompt=0, generated=0)
        fake: Any = llm
        with ThreadPoolExecutor(1) as starter:
            started = Started(fake, counter, base, FINGERPRINT, frozenset(), gpus)
            try:
                async with asyncio.timeout(20):
                    await scenario(VLLMEngine(started, settings, starter), llm)
            finally:
                llm.output_handler.cancel()

    return lambda scenario, gpus=("GPU-1", "GPU-2"): asyncio.run(main(scenario, gpus))


def engine_settings(model: str, **more: Any) -> EngineSettings:
    return EngineSettings(
        model=model,
        revision=None,
        device="cuda",
        dtype="float32",
        max_model_len=64,
        max_lora_rank=0,
        max_loras=2,
        **more,
    )


def test_every_worker_joins_the_group_of_the_trainer(play: Play) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.weight_transports == ("files", "nccl")
        assert engine.receiver is not None and engine.receiver.ranks == ("GPU-1", "GPU-2")
        await engine.receiver.link(UNIQUE_ID)
        assert llm.linked == link_info(UNIQUE_ID, 2)
        assert (llm.linked["world_size"], llm.linked["rank_offset"]) == (3, 1)
        await engine.receiver.link(UNIQUE_ID)
        assert llm.calls == ["link", "unlink", "link"], "it leaves the group that it was in"

    play(scenario)


def test_weights_replace_the_model_in_one_pause(play: Play) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is not None
        await engine.receiver.link(UNIQUE_ID)
        llm.calls.clear()
        assert await engine.receiver.receive(3, [EMBEDDING, NORM]) == 2
        assert llm.calls == REPLACED
        assert llm.updated == update_info([EMBEDDING, NORM])
        assert llm.updated == {
            "names": ["model.embed_tokens.weight", "model.norm.weight"],
            "dtype_names": ["float32", "bfloat16"],
            "shapes": [[4, 2], [2]],
        }
        with pytest.raises(EngineRejects, match="version 0 is not loaded"):
            await anext(aiter(engine.generate([[1]], Sampling(max_tokens=1), [[1]], 0)))

    play(scenario)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([EMBEDDING], "weights are missing: model.norm.weight"),
        ([EMBEDDING, NORM, NORM], "announced twice"),
        ([EMBEDDING, NORM.model_copy(update={"shape": [3]})], "has shape"),
        ([EMBEDDING, NORM, TensorLayout(name="x", dtype="float32", shape=[])], "not the model's: x"),
        ([EMBEDDING, NORM, HEAD], "comes twice"),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_happens(
    play: Play, tensors: list[TensorLayout], why: str
) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is not None
        await engine.receiver.link(UNIQUE_ID)
        llm.calls.clear()
        with pytest.raises(EngineRejects, match=why):
            engine.receiver.check(tensors)
        with pytest.raises(EngineRejects, match=why):
            await engine.receiver.receive(3, tensors)
        assert llm.calls == [] and engine.receiver.is_linked

    play(scenario)


@pytest.mark.parametrize("broken", REPLACED)
def test_a_transfer_that_fails_ends_the_engine(play: Play, broken: str) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is not None
        await engine.receiver.link(UNIQUE_ID)
        llm.broken = broken
        with pytest.raises(ServerError, match="failed to replace its weights") as caught:
            await engine.receiver.receive(3, [EMBEDDING, NORM])
        assert caught.value.code == "E-SRV-23" and "invalid usage" in caught.value.why
        assert "invalid usage" in await engine.died()
        assert not engine.receiver.is_linked

    play(scenario)


def test_a_transfer_that_is_cancelled_ends_the_engine(play: Play) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is not None
        await engine.receiver.link(UNIQUE_ID)
        llm.stuck = "update"
        receiving = asyncio.ensure_future(engine.receiver.receive(3, [EMBEDDING, NORM]))
        await llm.asked.wait()
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert "broke off" in await engine.died()

    play(scenario)


def test_a_transfer_that_never_began_ends_the_engine_too(play: Play) -> None:
    """It waits for a change before it; the trainer sends already, and its half would wait for ever."""

    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is not None
        await engine.receiver.link(UNIQUE_ID)
        async with engine.quiet():
            receiving = asyncio.ensure_future(engine.receiver.receive(3, [EMBEDDING, NORM]))
            await asyncio.sleep(0)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
        assert "broke off" in await engine.died()

    play(scenario)


def test_workers_that_cannot_join_are_a_refusal_and_the_engine_goes_on(play: Play) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is not None
        llm.broken = "link"
        with pytest.raises(EngineRejects, match="invalid usage"):
            await engine.receiver.link(UNIQUE_ID)
        assert not engine.receiver.is_linked
        llm.broken = ""
        await engine.receiver.link(UNIQUE_ID)
        assert engine.receiver.is_linked

    play(scenario)


def test_workers_that_may_or_may_not_have_joined_end_the_engine(play: Play) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is not None
        llm.stuck = "link"
        linking = asyncio.ensure_future(engine.receiver.link(UNIQUE_ID))
        await llm.asked.wait()
        linking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await linking
        assert "did not join" in await engine.died()

    play(scenario)


def test_a_reset_leaves_the_group_and_reads_the_base_model_from_its_files(play: Play) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is not None
        await engine.receiver.link(UNIQUE_ID)
        await engine.receiver.receive(3, [EMBEDDING, NORM])
        llm.calls.clear()
        await engine.reset()
        assert llm.calls[:3] == ["unlink", "pause wait", "reload_weights base"]
        assert not engine.receiver.is_linked

    play(scenario)


def test_a_server_that_was_not_asked_for_it_has_no_transfer(play: Play) -> None:
    async def scenario(engine: VLLMEngine, llm: ScriptedLLM) -> None:
        assert engine.receiver is None and engine.weight_transports == ("files",)

    play(scenario, ())


def test_the_engine_is_started_for_transfers_only_where_they_are_wanted() -> None:
    assert engine_arguments(engine_settings("m", weight_transfer=True), "m")["weight_transfer_config"] == {
        "backend": "nccl"
    }
    assert "weight_transfer_config" not in engine_arguments(engine_settings("m"), "m")
