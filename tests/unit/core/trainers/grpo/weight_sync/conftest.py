from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from tests.support.tiny_model import tiny_config


@pytest.fixture
def make_policy() -> Callable[..., PeftModel]:
    """A tiny model with an adapter; `is_trained` gives every trained tensor random numbers."""

    def make(*, is_trained: bool = True, tie: bool = False, **lora: object) -> PeftModel:
        torch.set_num_threads(1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            base = LlamaForCausalLM(tiny_config(tie_word_embeddings=tie, attention_bias=True)).float()
            targets = lora.pop("target_modules", ["q_proj", "down_proj"])
            config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **lora)  # type: ignore[arg-type]
            model = get_peft_model(base, config)
            if is_trained:
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.requires_grad:
                            parameter.add_(torch.randn_like(parameter) * 0.05)
        assert isinstance(model, PeftModel)
        return model.eval()

    return make
