"""Merging against PEFT's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from axolotl.serving.engines.lora import LoraPair, read_adapter
from axolotl.serving.engines.merging import MergedWeights
from axolotl.serving.engines.protocol import EngineRejects
from tests.support.tiny_model import make_random_adapter, make_tiny_model, tiny_config

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


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


def test_in_bfloat16_the_sum_is_rounded_once(model_dir: Path, adapters: dict[int, Path]) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    pairs = read_adapter(adapters[1])
    name = "model.layers.0.self_attn.q_proj"
    base = model.get_submodule(name).weight.double()
    MergedWeights(model).merge(pairs)
    exact = base + pairs[name].scale * pairs[name].b.double() @ pairs[name].a.double()
    merged = model.get_submodule(name).weight.double()
    assert ((merged - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()


def test_a_tied_output_layer_is_refused_since_its_merge_would_change_the_embedding() -> None:
    model = LlamaForCausalLM(tiny_config(tie_word_embeddings=True))
    with pytest.raises(EngineRejects, match=r"'lm_head' shares its weight with model\.embed_tokens\.weight"):
        MergedWeights(model).check({"lm_head": LoraPair(torch.zeros(1, 64), torch.zeros(384, 1), 1.0)})


def test_a_failed_merge_is_repaired_by_the_next(model_dir: Path, adapters: dict[int, Path]) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    weights, base = MergedWeights(model), logits_of(model)
    pairs = read_adapter(adapters[1])
    weights.merge(pairs)
    merged = logits_of(model)
    last = max(pairs)
    broken = {**pairs, last: LoraPair(pairs[last].a[:, :1], pairs[last].b, 1.0)}
    with pytest.raises(RuntimeError):
        weights.merge(broken)
    weights.merge({})
    assert torch.equal(logits_of(model), base)
    weights.merge(pairs)
    assert torch.equal(logits_of(model), merged)
