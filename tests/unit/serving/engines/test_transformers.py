"""Merging against PEFT's own forward, and versions that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from axolotl.serving.engines.inference import DecodingCancelled
from axolotl.serving.engines.lora import LoraPair, read_adapter
from axolotl.serving.engines.protocol import EngineRejects, EngineSettings
from axolotl.serving.engines.transformers import MergedWeights, TransformersEngine, cache_tokens
from axolotl.serving.wire import Sampling
from tests.support.groups import all_groups
from tests.support.tiny_model import make_random_adapter, make_tiny_model, tiny_config

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
PROMPTS = [[5, 6, 7], [8, 9]]
TOKENS = [[10, 11], [12, 13, 14]]


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
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        1: make_random_adapter(model_dir, root / "v1", seed=1),
        2: make_random_adapter(model_dir, root / "v2", seed=2, target_modules=("q_proj", "down_proj")),
    }


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_merging_equals_peft_and_can_be_undone(model_dir: Path, adapters: dict[int, Path]) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    base = logits_of(model)
    weights = MergedWeights(model)
    for version in (1, 2, 1):
        peft = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model_dir).float(), adapters[version])
        weights.merge(read_adapter(adapters[version]))
        torch.testing.assert_close(logits_of(model), logits_of(peft.eval()), atol=1e-4, rtol=1e-4)
    weights.merge({})
    assert torch.equal(logits_of(model), base)


def test_two_hundred_merges_do_not_drift(model_dir: Path, adapters: dict[int, Path]) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    weights = MergedWeights(model)
    pairs = {version: read_adapter(path) for version, path in adapters.items()}
    weights.merge(pairs[1])
    first = logits_of(model)
    for _ in range(100):
        weights.merge(pairs[2])
        weights.merge(pairs[1])
    assert torch.equal(logits_of(model), first)


def test_transposed_layers_are_merged_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50)).eval()
    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    peft = get_peft_model(model, config).eval()
    expected = logits_of(peft)
    peft.save_pretrained(tmp_path)
    base = peft.unload()
    assert not torch.allclose(logits_of(base), expected, atol=1e-3)
    # `init_lora_weights: false` is a test's way to get a B that is not zero, and says nothing about the tensors.
    weights = MergedWeights(base)
    pairs = read_adapter(tmp_path)
    weights.check(pairs)
    weights.merge(pairs)
    torch.testing.assert_close(logits_of(base), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "shape", "named"),
    [("model.layers.9.mlp.up_proj", (4, 4), "no linear module"), ("lm_head", (4, 4), "64 -> 384")],
)
def test_pairs_that_do_not_fit(module: str, shape: tuple[int, int], named: str) -> None:
    weights = MergedWeights(LlamaForCausalLM(tiny_config()))
    with pytest.raises(EngineRejects, match=named):
        weights.check({module: LoraPair(torch.zeros(1, shape[1]), torch.zeros(shape[0], 1), 1.0)})


def with_engine(model_dir: Path, body: Callable[[TransformersEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        settings = EngineSettings(
            model=str(model_dir),
            revision=None,
            device="cpu",
            dtype="float32",
            max_model_len=64,
            max_lora_rank=8,
            max_loras=3,
        )
        engine = await TransformersEngine.create(settings)
        try:
            await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.close()

    asyncio.run(run())


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
        assert await engine.score(PROMPTS, TOKENS, 1.0, 1) == before

    with_engine(model_dir, body)


def test_the_end_tokens_of_the_tokenizer_end_a_completion(model_dir: Path) -> None:
    async def body(engine: TransformersEngine) -> None:
        groups = await all_groups(
            engine.generate([[5]], Sampling(n=64, max_tokens=60, temperature=3.0), [list(range(64))], 0)
        )
        stopped = [c for c in groups[0].completions if c.finish_reason == "stop"]
        assert stopped and all(c.ids[-1] == 2 for c in stopped)

    with_engine(model_dir, body)


def test_closing_ends_a_long_request(model_dir: Path) -> None:
    async def body(engine: TransformersEngine) -> None:
        sampling = Sampling(n=2, max_tokens=10_000, extra={"ignore_eos": True})
        running = asyncio.create_task(all_groups(engine.generate([[5]], sampling, [[1, 2]], 0)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises((DecodingCancelled, asyncio.CancelledError)):
            await running

    with_engine(model_dir, body)


def test_cache_size_in_positions() -> None:
    """2 (K and V) x 2 layers x 2 heads x 32 dimensions x 4 bytes are 1024 bytes a position."""
    model = LlamaForCausalLM(tiny_config())
    assert cache_tokens(model, 4 << 20) == 4096
    assert cache_tokens(model, 1) == 1024
