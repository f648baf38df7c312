from collections.abc import Callable

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from axolotl.core.trainers.grpo.weight_sync.merged import policy_weights
from tests.support.tiny_model import tiny_config

MakePolicy = Callable[..., PeftModel]
IDS = torch.tensor([[5, 6, 7, 8, 300, 41]])

ADAPTERS: list[dict[str, object]] = [
    {},
    {"use_dora": True},
    {"use_rslora": True},
    {"bias": "all"},
    {"modules_to_save": ["norm", "up_proj"]},
    {"init_lora_weights": "pissa"},
    {"target_modules": ["embed_tokens", "v_proj"]},
]


@torch.no_grad()
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: next(iter(adapter), "plain"))
def test_a_plain_model_with_these_weights_computes_what_the_policy_does(
    adapter: dict[str, object], make_policy: MakePolicy
) -> None:
    policy = make_policy(**adapter)
    weights = dict(policy_weights(policy))
    plain = LlamaForCausalLM(tiny_config(attention_bias=True)).eval()
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    expected = policy(IDS).logits
    torch.testing.assert_close(plain(IDS).logits, expected, atol=1e-5, rtol=1e-4)
    with policy.disable_adapter():
        assert not torch.allclose(policy(IDS).logits, expected, atol=1e-2), "the adapter must matter"


@torch.no_grad()
@pytest.mark.parametrize("adapter", ADAPTERS[:3], ids=lambda adapter: next(iter(adapter), "plain"))
def test_merging_often_changes_nothing(adapter: dict[str, object], make_policy: MakePolicy) -> None:
    policy = make_policy(**adapter)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    first = {name: value.clone() for name, value in policy_weights(policy)}
    for _ in range(3):
        again = dict(policy_weights(policy))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert all(torch.equal(value, policy.state_dict()[name]) for name, value in before.items())


def test_a_model_without_an_adapter_gives_its_own_tensors() -> None:
    model = LlamaForCausalLM(tiny_config())
    weights = dict(policy_weights(model))
    assert weights.keys() == model.state_dict().keys()
    assert all(value.data_ptr() == model.state_dict()[name].data_ptr() for name, value in weights.items())


def test_a_weight_with_two_names_comes_once(make_policy: MakePolicy) -> None:
    names = [name for name, _ in policy_weights(make_policy(tie=True))]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))
