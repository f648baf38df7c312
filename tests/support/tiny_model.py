"""A random two-layer Llama with its own small tokenizer, made on the spot: no network, half a megabyte, a second.

Attention heads have 32 dimensions because the CPU kernels of vLLM accept no smaller ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 384
MAX_POSITIONS = 512

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = (
    "What is 1 + 2? The answer is 3. Answer with the number only.",
    "What is 12 + 7? The sum of 12 and 7 is 19.",
    "system user assistant question answer number add two numbers together",
    "The quick brown fox jumps over the lazy dog. 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    "Think step by step, then write the final answer on the last line.",
)


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over `CORPUS`: every text can be encoded, chat marks are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=MAX_POSITIONS
    )
    result.chat_template = CHAT_TEMPLATE
    return result


def tiny_config(**overrides: object) -> LlamaConfig:
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    return LlamaConfig(**{**settings, **overrides})


def make_tiny_model(directory: Path, *, seed: int = 0, **config_overrides: object) -> Path:
    """Save a random float32 model and its tokenizer in `directory`, and return `directory`.

    The same seed gives the same weights; the global random state is left as it was.
    """
    directory = Path(directory)
    tokenizer = make_tiny_tokenizer()
    assert len(tokenizer) <= VOCAB_SIZE and tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(**config_overrides))
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_random_adapter(
    model_directory: Path,
    directory: Path,
    *,
    rank: int = 8,
    seed: int = 1,
    scale: float = 0.1,
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    lora_alpha: int | None = None,
) -> Path:
    """Save a PEFT adapter whose A and B are both random, so that it changes the model visibly, in `directory`."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=lora_alpha or rank, target_modules=list(target_modules), task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = get_peft_model(LlamaForCausalLM.from_pretrained(model_directory, dtype="float32"), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=scale)
    model.save_pretrained(directory)
    return Path(directory)
