"""Accuracy on the held-out questions with greedy decoding, of the base model or of an adapter on top of it.

`python evaluate.py` measures the base model, `python evaluate.py output` the adapter in output/. `make quickstart` has
to have made model/ and data/ before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MAX_TOKENS = 10


def load(model_directory: Path, adapter: Path | None = None) -> tuple[Any, Any]:
    """Model in float32 and its tokenizer."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return model, tokenizer


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Share of the rows whose greedy answer is right."""
    from rewards import chat, is_right

    from axolotl.serving.engines.decoding import decode
    from axolotl.serving.wire import Sampling

    prompts = [
        tokenizer.apply_chat_template(chat(row["question"]), add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in rows
    ]
    groups = decode(
        model,
        prompts,
        Sampling(n=1, max_tokens=MAX_TOKENS, temperature=0.0),
        seeds=[[0]] * len(prompts),
        eos_token_ids={tokenizer.eos_token_id},
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = [tokenizer.decode(group.completions[0].ids, skip_special_tokens=True) for group in groups]
    return sum(is_right(text, row["answer"]) for text, row in zip(texts, rows, strict=True)) / len(rows)


def heldout_accuracy(adapter: Path | None = None) -> float:
    rows = [json.loads(line) for line in (HERE / "data" / "heldout.jsonl").read_text().splitlines()]
    return accuracy(*load(HERE / "model", adapter), rows)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(f"{heldout_accuracy(Path(sys.argv[1]) if len(sys.argv) > 1 else None):.0%}")
