"""A model's directory may hold code. Without `trust_remote_code` no line of it runs, in neither process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from axolotl.errors import AxolotlError
from axolotl.loaders.model import load_model
from axolotl.loaders.precision import resolve_precision
from axolotl.loaders.tokenizer import load_tokenizer
from axolotl.scripts.vllm_serve_lora import start_failure
from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.fingerprint import fingerprint
from axolotl.utils.schemas.config import AxolotlConfig
from tests.support.tiny_model import make_tiny_model, make_tiny_tokenizer

CODE = """
from pathlib import Path
Path(MARKER).touch()
raise RuntimeError("code of the model ran")
"""
CLASSES = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel", "AutoTokenizer": ["own.A", "own.B"]}


def model_with_code(directory: Path, model_type: str) -> Path:
    model = make_tiny_model(directory / "model")
    (model / "own.py").write_text(f"MARKER = {str(directory / 'it-ran')!r}\n{CODE}")
    for name, changes in (("config.json", {"model_type": model_type}), ("tokenizer_config.json", {})):
        described = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**described, **changes, "auto_map": CLASSES}))
    return model


def in_the_trainer(model: Path) -> None:
    config = AxolotlConfig(base_model=str(model), rl="grpo")
    load_model(config, make_tiny_tokenizer(), resolve_precision(config, "cpu"), "cpu")


def in_the_server(model: Path) -> None:
    settings = EngineSettings(
        model=str(model),
        revision=None,
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_lora_rank=8,
        max_loras=3,
    )

    async def create() -> None:
        await (await TransformersEngine.create(settings)).close()

    try:
        asyncio.run(create())
    except Exception as error:
        raise start_failure(error) from error


def as_a_tokenizer(model: Path) -> None:
    load_tokenizer(AxolotlConfig(base_model=str(model), rl="grpo"), Path())


def as_a_fingerprint(model: Path) -> None:
    fingerprint(str(model), None, False)


PLACES = [in_the_trainer, in_the_server, as_a_tokenizer, as_a_fingerprint]


@pytest.mark.parametrize("place", PLACES)
def test_code_beside_a_model_that_is_known_is_left_alone(place: Callable[[Path], None], tmp_path: Path) -> None:
    place(model_with_code(tmp_path, "llama"))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("place", [in_the_trainer, in_the_server])
def test_a_model_that_is_nothing_without_its_code_is_refused(place: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(AxolotlError) as refused:
        place(model_with_code(tmp_path, "own"))
    assert "trust_remote_code" in str(refused.value.report())
    assert not (tmp_path / "it-ran").exists()


def test_the_code_would_run_if_it_were_trusted(tmp_path: Path) -> None:
    """What says that it did not run must be able to see that it does."""
    model = model_with_code(tmp_path, "own")
    with pytest.raises(Exception, match="code of the model ran"):
        fingerprint(str(model), None, True)
    assert (tmp_path / "it-ran").exists()
