from collections.abc import Callable

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from axolotl.core.trainers.grpo.weight_sync.canary import NUM_SIZES, canary
from tests.support.tiny_model import tiny_config

MakePolicy = Callable[..., PeftModel]


def state(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_it_is_there_for_a_moment_and_leaves_bit_for_bit_what_was(make_policy: MakePolicy) -> None:
    model = make_policy()
    before, random_state = state(model), torch.get_rng_state()
    with canary(model, 7):
        during = state(model)
    after = state(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    changed = {name for name in before if not torch.equal(before[name], during[name])}
    assert changed == {name for name in before if "lora_B" in name} != set()
    assert torch.equal(random_state, torch.get_rng_state())


def test_it_goes_when_something_fails(make_policy: MakePolicy) -> None:
    model = make_policy()
    before = state(model)
    with pytest.raises(RuntimeError, match="full"), canary(model, 7):
        raise RuntimeError("the disk is full")
    assert all(torch.equal(before[name], value) for name, value in state(model).items())


def test_a_fresh_adapter_computes_something_with_it(make_policy: MakePolicy) -> None:
    model = make_policy(is_trained=False)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        base = model(ids).logits
        with canary(model, 7):
            assert not torch.allclose(model(ids).logits, base, atol=1e-3)
        assert torch.equal(model(ids).logits, base)


def test_each_size_is_twice_the_one_before(make_policy: MakePolicy) -> None:
    model = make_policy()
    name = next(name for name in model.state_dict() if "lora_B" in name)
    with canary(model, 5):
        small = state(model)[name]
    with canary(model, 7):
        torch.testing.assert_close(state(model)[name], small * 4)


def test_an_adapter_of_the_embeddings_has_its_zeros_on_the_other_side(make_policy: MakePolicy) -> None:
    model = make_policy(is_trained=False, target_modules=["embed_tokens"])
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        base = model(ids).logits
        with canary(model, 10):
            assert not torch.allclose(model(ids).logits, base, atol=1e-3)


def test_what_is_trained_beside_the_adapter_is_changed_too(make_policy: MakePolicy) -> None:
    model = make_policy(modules_to_save=["norm"], use_dora=True)
    before = state(model)
    with canary(model, 3):
        during = state(model)
    changed = {name for name in before if not torch.equal(before[name], during[name])}
    assert changed == {name for name in before if "lora_B" in name or "norm.modules_to_save" in name}
    assert all(torch.equal(before[name], value) for name, value in state(model).items())


# Full weights


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def plain(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(tiny_config(attention_bias=True)).to(request.param).eval()


@pytest.mark.parametrize("size", [0, NUM_SIZES - 1])
def test_every_weight_is_changed_and_comes_back_bit_for_bit(plain: LlamaForCausalLM, size: int) -> None:
    with torch.no_grad():
        for weight in plain.parameters():
            weight.add_(torch.tensor(0.01))  # biases are zeros at first, which have no sign
        plain.lm_head.weight[0, :2] = torch.tensor([-0.0, float("inf")])
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with canary(plain, size):
        assert all(not torch.equal(before[name], value) for name, value in plain.named_parameters())
    for name, value in plain.state_dict().items():
        assert torch.equal(before[name].view(torch.uint8), value.view(torch.uint8)), name


def test_no_second_copy_of_the_weights_is_made(plain: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are flipped are copied, one matrix after the other, and nothing is kept."""
    largest = max(weight.nbytes for weight in plain.parameters())
    addresses = [weight.data_ptr() for weight in plain.parameters()]
    copied = []
    select = torch.Tensor.index_select

    def noted(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        result = select(self, dim, index)
        copied.append(result.nbytes)
        return result

    monkeypatch.setattr(torch.Tensor, "index_select", noted)
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_: pytest.fail("a copy"))
    with canary(plain, NUM_SIZES - 1):
        assert [weight.data_ptr() for weight in plain.parameters()] == addresses
    assert copied and max(copied) <= largest / 2 + 1e3


def test_more_rows_make_another_model(plain: LlamaForCausalLM) -> None:
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = plain(ids).logits
        with canary(plain, NUM_SIZES - 1):
            assert not torch.allclose(plain(ids).logits, before, atol=1e-2)
        assert torch.equal(plain(ids).logits, before)
