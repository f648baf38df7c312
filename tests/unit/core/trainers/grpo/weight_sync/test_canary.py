from collections.abc import Callable

import pytest
import torch
from peft import PeftModel

from axolotl.core.trainers.grpo.weight_sync.canary import canary

MakePolicy = Callable[..., PeftModel]


def state(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_it_is_there_for_a_moment_and_leaves_bit_for_bit_what_was(make_policy: MakePolicy) -> None:
    model = make_policy()
    before, random_state = state(model), torch.get_rng_state()
    with canary(model, 0.1):
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
    with pytest.raises(RuntimeError, match="full"), canary(model, 0.1):
        raise RuntimeError("the disk is full")
    assert all(torch.equal(before[name], value) for name, value in state(model).items())


def test_a_fresh_adapter_computes_something_with_it(make_policy: MakePolicy) -> None:
    model = make_policy(is_trained=False)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        base = model(ids).logits
        with canary(model, 0.1):
            assert not torch.allclose(model(ids).logits, base, atol=1e-3)
        assert torch.equal(model(ids).logits, base)


def test_the_scale_is_all_that_differs_between_calls(make_policy: MakePolicy) -> None:
    model = make_policy()
    name = next(name for name in model.state_dict() if "lora_B" in name)
    with canary(model, 0.1):
        small = state(model)[name]
    with canary(model, 0.4):
        torch.testing.assert_close(state(model)[name], small * 4)
