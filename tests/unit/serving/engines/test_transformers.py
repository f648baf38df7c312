"""The engine around the decoding: versions that come and go, groups as they finish, what a close or a reset ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from axolotl.errors import ServerError
from axolotl.serving.engines import transformers as engine_module
from axolotl.serving.engines.protocol import EngineProgress, EngineRejects, EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.engines.transformers_start import cache_tokens
from axolotl.serving.wire import Fingerprint, Sampling
from tests.support.groups import all_groups
from tests.support.tiny_model import make_random_adapter, make_tiny_model, tiny_config

PROMPTS = [[5, 6, 7], [8, 9]]
TOKENS = [[10, 11], [12, 13, 14]]
NO_FINGERPRINT = Fingerprint(base_model="tiny", config="", tokenizer="", weights="", summary={})
ENDLESS = {"ignore_eos": True}
DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights: what full fine-tuning pushes."""
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        1: make_random_adapter(model_dir, root / "v1", seed=1),
        2: make_random_adapter(model_dir, root / "v2", seed=2, target_modules=("q_proj", "down_proj")),
    }


Body = Callable[[TransformersEngine], Awaitable[None]]


def with_engine(model_dir: Path, body: Body, *, dtype: str = "float32") -> None:
    async def run() -> None:
        settings = EngineSettings(
            model=str(model_dir),
            revision=None,
            device="cpu",
            dtype=dtype,
            max_model_len=64,
            max_lora_rank=8,
            max_loras=3,
        )
        engine = await TransformersEngine.create(settings)
        try:
            await asyncio.wait_for(body(engine), DEADLINE_S)
        finally:
            await engine.close()

    asyncio.run(run())


class Gate:
    """Stops a model before each forward pass after the first `free` ones, until `open`. count: passes begun."""

    def __init__(self, model: LlamaForCausalLM, *, free: int) -> None:
        self.count = 0
        self._free = free
        self._opened = threading.Event()
        self.reached = threading.Event()
        model.register_forward_pre_hook(self._wait)

    def open(self) -> None:
        self._opened.set()

    def _wait(self, *_: object) -> None:
        self.count += 1
        if self.count > self._free:
            self.reached.set()
            assert self._opened.wait(DEADLINE_S)


def with_gate(body: Callable[[TransformersEngine, Gate], Awaitable[None]], *, free: int) -> None:
    """An engine over a model of its own, held by a gate."""

    async def run() -> None:
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config()).eval()
        gate = Gate(model, free=free)
        engine = TransformersEngine(
            model,
            model_fingerprint=NO_FINGERPRINT,
            eos_token_ids=frozenset({2}),
            pad_token_id=0,
            max_model_len=512,
            max_lora_rank=8,
            read_base=dict,
        )
        try:
            await asyncio.wait_for(body(engine, gate), DEADLINE_S)
        finally:
            gate.open()
            await engine.close()

    asyncio.run(run())


# Groups as they finish


def test_a_group_does_not_wait_for_the_slowest() -> None:
    """The second prompt's greedy completion begins with the token that stops; the first goes on, held at its gate."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    with torch.no_grad():
        greedy = [int(model(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in PROMPTS]
    assert greedy[0] != greedy[1]
    sampling = Sampling(max_tokens=3, temperature=0.0, extra={**ENDLESS, "stop_token_ids": [greedy[1]]})

    async def body(engine: TransformersEngine, gate: Gate) -> None:
        async with aclosing(engine.generate(PROMPTS, sampling, [[0], [0]], 0)) as stream:
            first = await anext(stream)
            assert (first.index, first.completions[0].ids) == (1, [greedy[1]])
            assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S), "the other row is still being decoded"
            gate.open()
            rest = [group async for group in stream]
        assert [group.index for group in rest] == [0] and rest[0].completions[0].ids[0] == greedy[0]

    with_gate(body, free=1)


def test_closing_the_stream_ends_the_decoding_within_a_step() -> None:
    async def body(engine: TransformersEngine, gate: Gate) -> None:
        sampling = Sampling(n=2, max_tokens=400, extra=ENDLESS)
        stream = engine.generate(PROMPTS, sampling, [[1, 2], [3, 4]], 0)
        waiting = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await stream.aclose()
        gate.open()
        # The worker is free again once it answers this.
        await engine.score(PROMPTS, TOKENS, 1.0, 0)
        assert gate.count == 3 + 1 + len(PROMPTS), "the pass that was held, and those of the scoring"

    with_gate(body, free=3)


def test_a_queued_request_that_nobody_waits_for_is_never_begun() -> None:
    async def body(engine: TransformersEngine, gate: Gate) -> None:
        running = asyncio.ensure_future(engine.score(PROMPTS[:1], TOKENS[:1], 1.0, 0))
        queued = asyncio.ensure_future(all_groups(engine.generate(PROMPTS, Sampling(max_tokens=9), [[1], [2]], 0)))
        assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
        queued.cancel()
        await asyncio.wait([queued], timeout=DEADLINE_S)
        gate.open()
        await running
        await engine.score(PROMPTS[:1], TOKENS[:1], 1.0, 0)
        assert gate.count == 2

    with_gate(body, free=0)


def test_options_are_refused_before_anything_is_queued() -> None:
    async def body(engine: TransformersEngine, gate: Gate) -> None:
        sampling = Sampling(max_tokens=3, structured_regex="a")
        for refuse in (
            lambda: all_groups(engine.generate(PROMPTS, sampling, [[0], [0]], 0)),
            lambda: asyncio.to_thread(engine.check_sampling, sampling),
        ):
            with pytest.raises(EngineRejects, match="vllm_guided_decoding_regex"):
                await refuse()
        with pytest.raises(EngineRejects, match="token id 384 is not in the vocabulary"):
            engine.check_sampling(Sampling(max_tokens=3, extra={"stop_token_ids": [384]}))
        assert gate.count == 0

    with_gate(body, free=0)


# Progress


def test_progress_counts_while_the_worker_decodes() -> None:
    """5 prompt tokens and 4 first tokens are done when the second pass is held; scoring reads 4 and 4 tokens."""

    async def body(engine: TransformersEngine, gate: Gate) -> None:
        assert engine.progress() == EngineProgress(0, 0)
        sampling = Sampling(n=2, max_tokens=2, extra=ENDLESS)
        running = asyncio.ensure_future(all_groups(engine.generate(PROMPTS, sampling, [[1, 2], [3, 4]], 0)))
        assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
        assert engine.progress() == EngineProgress(5 + 4, 4)
        gate.open()
        await running
        assert engine.progress() == EngineProgress(5 + 8, 8)
        await engine.score(PROMPTS, TOKENS, 1.0, 0)
        assert engine.progress() == EngineProgress(5 + 8 + 8, 8)

    with_gate(body, free=1)


# Versions


def test_concurrent_requests_get_the_version_they_ask_for(model_dir: Path, adapters: dict[int, Path]) -> None:
    async def body(engine: TransformersEngine) -> None:
        base = await engine.score(PROMPTS, TOKENS, 1.0, 0)
        for version, path in adapters.items():
            assert await engine.load_adapter(version, path) == {1: 14, 2: 4}[version]
        alone = {version: await engine.score(PROMPTS, TOKENS, 1.0, version) for version in (1, 2)}
        order = [1, 2, 0, 2, 1, 0]
        mixed = await asyncio.gather(*(engine.score(PROMPTS, TOKENS, 1.0, version) for version in order))
        assert mixed == [{0: base, **alone}[version] for version in order]
        assert alone[1] != alone[2] != base
        await engine.unload_adapter(2)
        with pytest.raises(EngineRejects, match=r"version 2 is not loaded; loaded: \[0, 1\]"):
            await engine.score(PROMPTS, TOKENS, 1.0, 2)
        await engine.reset()
        assert await engine.score(PROMPTS, TOKENS, 1.0, 0) == base

    with_engine(model_dir, body)


def test_a_bad_adapter_leaves_the_engine_as_it_was(model_dir: Path, adapters: dict[int, Path], tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    misfit = make_random_adapter(other, tmp_path / "misfit")

    async def body(engine: TransformersEngine) -> None:
        await engine.load_adapter(1, adapters[1])
        before = await engine.score(PROMPTS, TOKENS, 1.0, 1)
        with pytest.raises(EngineRejects, match="the adapter is for"):
            await engine.load_adapter(2, misfit)
        with pytest.raises(EngineRejects, match="version 1 is already loaded"):
            await engine.load_adapter(1, adapters[2])
        assert await engine.score(PROMPTS, TOKENS, 1.0, 1) == before

    with_engine(model_dir, body)


def test_an_adapter_file_changed_after_its_load_changes_nothing(
    model_dir: Path, adapters: dict[int, Path], tmp_path: Path
) -> None:
    copied = tmp_path / "v1"
    copied.mkdir()
    for file in adapters[1].iterdir():
        (copied / file.name).write_bytes(file.read_bytes())

    async def body(engine: TransformersEngine) -> None:
        await engine.load_adapter(1, copied)
        before = await engine.score(PROMPTS, TOKENS, 1.0, 1)
        with (copied / "adapter_model.safetensors").open("r+b") as weights:
            size = weights.seek(0, 2)
            weights.seek(size // 2)
            weights.write(b"\x01" * (size - size // 2))
        await engine.score(PROMPTS, TOKENS, 1.0, 0)
        assert await engine.score(PROMPTS, TOKENS, 1.0, 1) == before

    with_engine(model_dir, body)


@pytest.mark.slow
def test_five_hundred_adapters_leave_nothing_behind(model_dir: Path, adapters: dict[int, Path]) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    async def body(engine: TransformersEngine) -> None:
        async def push(versions: range) -> None:
            for version in versions:
                await engine.load_adapter(version, adapters[1 + version % 2])
                await engine.unload_adapter(version - 1)

        await push(range(1, 5))
        before, addresses = tensors(), sorted(tensor.data_ptr() for tensor in engine._model.parameters())
        await push(range(5, 505))
        assert tensors() == before
        assert sorted(tensor.data_ptr() for tensor in engine._model.parameters()) == addresses

    with_engine(model_dir, body)


# Full weights


def test_pushed_weights_replace_the_base_and_a_reset_brings_it_back(
    model_dir: Path, other_dir: Path, adapters: dict[int, Path], tmp_path: Path
) -> None:
    pushed = tmp_path / "v3"
    pushed.mkdir()
    (pushed / "model.safetensors").write_bytes((other_dir / "model.safetensors").read_bytes())
    expected = {}

    async def other(engine: TransformersEngine) -> None:
        expected["plain"] = await engine.score(PROMPTS, TOKENS, 1.0, 0)
        await engine.load_adapter(4, adapters[1])
        expected["adapted"] = await engine.score(PROMPTS, TOKENS, 1.0, 4)

    async def body(engine: TransformersEngine) -> None:
        base = await engine.score(PROMPTS, TOKENS, 1.0, 0)
        bits = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
        await engine.load_adapter(1, adapters[1])
        adapted = await engine.score(PROMPTS, TOKENS, 1.0, 1)
        assert await engine.load_weights(3, pushed) == len(bits)
        assert await engine.score(PROMPTS, TOKENS, 1.0, 3) == expected["plain"] != base
        for gone in (0, 1):
            with pytest.raises(EngineRejects, match=rf"version {gone} is not loaded; loaded: \[3\]"):
                await engine.score(PROMPTS, TOKENS, 1.0, gone)
        await engine.load_adapter(4, adapters[1])
        assert await engine.score(PROMPTS, TOKENS, 1.0, 4) == expected["adapted"]
        await engine.unload_adapter(4)
        assert await engine.score(PROMPTS, TOKENS, 1.0, 3) == expected["plain"]
        await engine.reset()
        assert all(torch.equal(tensor, bits[name]) for name, tensor in engine._model.state_dict().items())
        await engine.load_adapter(1, adapters[1])
        assert await engine.score(PROMPTS, TOKENS, 1.0, 1) == adapted
        assert await engine.score(PROMPTS, TOKENS, 1.0, 0) == base

    with_engine(other_dir, other)
    with_engine(model_dir, body)


def test_float32_weights_for_a_bfloat16_server(model_dir: Path, other_dir: Path) -> None:
    expected = load_file(other_dir / "model.safetensors")

    async def body(engine: TransformersEngine) -> None:
        assert engine.dtype == "bfloat16"
        await engine.load_weights(1, other_dir)
        assert all(torch.equal(t, expected[name].bfloat16()) for name, t in engine._model.state_dict().items())
        await engine.reset()
        base = load_file(model_dir / "model.safetensors")
        assert all(torch.equal(t, base[name].bfloat16()) for name, t in engine._model.state_dict().items())

    with_engine(model_dir, body, dtype="bfloat16")


def test_refused_weights_leave_the_adapter_that_is_served(
    model_dir: Path, adapters: dict[int, Path], tmp_path: Path
) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")

    async def body(engine: TransformersEngine) -> None:
        await engine.load_adapter(1, adapters[1])
        before = await engine.score(PROMPTS, TOKENS, 1.0, 1)
        with pytest.raises(EngineRejects, match="of the model's weights are missing"):
            await engine.load_weights(2, tmp_path)
        assert await engine.score(PROMPTS, TOKENS, 1.0, 1) == before

    with_engine(model_dir, body)


def test_a_request_in_flight_ends_on_the_weights_it_began_with(other_dir: Path) -> None:
    async def body(engine: TransformersEngine, gate: Gate) -> None:
        sampling = Sampling(max_tokens=20, extra=ENDLESS)
        gate.open()
        alone = await all_groups(engine.generate(PROMPTS, sampling, [[1], [2]], 0))
        running = asyncio.ensure_future(all_groups(engine.generate(PROMPTS, sampling, [[1], [2]], 0)))
        await asyncio.sleep(0)
        await engine.load_weights(1, other_dir)
        assert await running == alone
        assert await all_groups(engine.generate(PROMPTS, sampling, [[1], [2]], 1)) != alone

    with_gate(body, free=0)


@pytest.mark.parametrize("step", ["load", "reset"])
def test_a_failure_half_way_is_the_end_of_the_engine(
    other_dir: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr(engine_module, f"copy_{'weights' if step == 'load' else 'tensors'}", fail)

    async def body(engine: TransformersEngine, gate: Gate) -> None:
        gate.open()
        death = asyncio.ensure_future(engine.died())
        await engine.score(PROMPTS, TOKENS, 1.0, 0)
        assert not death.done()
        if step == "reset":
            await engine.load_weights(1, other_dir)
        with pytest.raises(ServerError, match="cannot serve any more") as fault:
            await (engine.load_weights(1, other_dir) if step == "load" else engine.reset())
        assert fault.value.code == "E-SRV-23" and "OSError" in fault.value.why
        assert await death == fault.value.why
        with pytest.raises(ServerError, match="cannot serve any more"):
            await engine.score(PROMPTS, TOKENS, 1.0, 1)

    with_gate(body, free=0)


@pytest.mark.parametrize(
    ("fault", "code", "is_end"),
    [(torch.AcceleratorError, "E-SRV-20", True), (torch.OutOfMemoryError, "E-SRV-21", False)],
)
def test_a_lost_device_is_the_end_and_too_little_memory_is_not(fault: type[Exception], code: str, is_end: bool) -> None:
    faults = [fault("it failed\nand more")]

    def fail(*_: object) -> None:
        if faults:
            raise faults.pop()

    async def body(engine: TransformersEngine, gate: Gate) -> None:
        gate.open()
        engine._model.register_forward_pre_hook(fail)
        death = asyncio.ensure_future(engine.died())
        with pytest.raises(ServerError, match="engine") as caught:
            await engine.score(PROMPTS, TOKENS, 1.0, 0)
        assert caught.value.code == code and "(it failed)" in caught.value.why
        if is_end:
            assert await death == caught.value.why
            with pytest.raises(ServerError, match="cannot serve any more"):
                await engine.score(PROMPTS, TOKENS, 1.0, 0)
        else:
            await engine.score(PROMPTS, TOKENS, 1.0, 0)
            assert not death.done()
            death.cancel()

    with_gate(body, free=0)


def test_ten_runs_on_one_engine_are_ten_fresh_engines(
    model_dir: Path, other_dir: Path, adapters: dict[int, Path]
) -> None:
    """Adapters, full weights and their order leave no trace beyond a reset: the same tokens and log-probs, bit for
    bit."""
    sampling = Sampling(n=2, max_tokens=8, temperature=0.9, top_p=0.8)

    async def run(engine: TransformersEngine, number: int) -> object:
        seeds = [[number, number + 1], [number + 2, number + 3]]
        groups = [await all_groups(engine.generate(PROMPTS, sampling, seeds, 0))]
        if number % 3 == 2:
            await engine.load_weights(1, other_dir)
        else:
            await engine.load_adapter(1, adapters[1 + number % 2])
        groups.append(await all_groups(engine.generate(PROMPTS, sampling, seeds, 1)))
        return groups

    async def reused(engine: TransformersEngine) -> None:
        for number in range(10):
            await engine.reset()
            results.append(await run(engine, number))

    async def fresh(engine: TransformersEngine) -> None:
        alone.append(await run(engine, len(alone)))

    results: list[object] = []
    alone: list[object] = []
    with_engine(model_dir, reused)
    for _ in range(10):
        with_engine(model_dir, fresh)
    assert results == alone


# Ends


def test_the_end_tokens_of_the_tokenizer_end_a_completion(model_dir: Path) -> None:
    async def body(engine: TransformersEngine) -> None:
        groups = await all_groups(
            engine.generate([[5]], Sampling(n=64, max_tokens=60, temperature=3.0), [list(range(64))], 0)
        )
        stopped = [c for c in groups[0].completions if c.finish_reason == "stop"]
        assert stopped and all(c.ids[-1] == 2 for c in stopped)

    with_engine(model_dir, body)


@pytest.mark.parametrize("end", ["reset", "close"])
def test_a_reset_and_a_close_give_up_what_runs(end: str) -> None:
    async def body(engine: TransformersEngine, gate: Gate) -> None:
        sampling = Sampling(n=2, max_tokens=10_000, extra=ENDLESS)
        running = asyncio.ensure_future(all_groups(engine.generate([[5]], sampling, [[1, 2]], 0)))
        assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
        ending = asyncio.ensure_future(getattr(engine, end)())
        await asyncio.sleep(0)
        gate.open()
        await ending
        with pytest.raises(ServerError, match="gave up a request") as fault:
            await running
        assert fault.value.code == "E-SRV-21"

    with_gate(body, free=4)


def test_cache_size_in_positions() -> None:
    """2 (K and V) x 2 layers x 2 heads x 32 dimensions x 4 bytes are 1024 bytes a position."""
    model = LlamaForCausalLM(tiny_config())
    assert cache_tokens(model, 4 << 20) == 4096
    assert cache_tokens(model, 1) == 1024
