"""Full weights pushed into the running vLLM engine, against transformers on the same files."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import Group
from tests.support.groups import all_groups
from tests.support.reference import load_reference, reference_logprobs
from tests.support.running_engine import (
    ENDLESS,
    LONG_PROMPT,
    PROMPTS,
    TOKENS,
    RunningEngine,
    generate,
    load,
    one,
    score,
)
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two other models of the same shape."""
    root = tmp_path_factory.mktemp("trained")
    first, second = (make_tiny_model(root / f"model-{seed}", seed=seed) for seed in (11, 12))
    return first, second


def push(running: RunningEngine, version: int, model: Path) -> int:
    return running.loop.run(running.engine.load_weights(version, model))


def publish(model: Path, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """What a trainer publishes: the tensors alone, in several files of its own naming."""
    directory.mkdir()
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, directory / f"part-{number:05}.safetensors")
    (directory / "manifest.json").write_text("{}")
    return directory


def test_pushed_weights_are_what_is_served(
    vllm_engine: RunningEngine, tiny_model: Path, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    untrained = score(vllm_engine, LONG_PROMPT, TOKENS)
    for version, model in enumerate(trained, start=1):
        directory = publish(model, tmp_path / f"v{version}")
        assert push(vllm_engine, version, directory) == len(load_file(model / "model.safetensors"))
        reference = load_reference(model)
        # The long prompt's cache blocks are those of the weights before.
        expected = reference_logprobs(reference, LONG_PROMPT, TOKENS)
        assert score(vllm_engine, LONG_PROMPT, TOKENS, version=version) == pytest.approx(expected, abs=1e-4)
        completion = one(generate(vllm_engine, PROMPTS[:1], [[1]], version=version))
        expected = reference_logprobs(reference, PROMPTS[0], completion.ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        with pytest.raises(EngineRejects, match=rf"version {version - 1} is not loaded; loaded: \[{version}\]"):
            score(vllm_engine, PROMPTS[0], TOKENS, version=version - 1)
        shutil.rmtree(directory)
    vllm_engine.loop.run(vllm_engine.engine.reset())
    assert score(vllm_engine, LONG_PROMPT, TOKENS) == pytest.approx(untrained, abs=1e-6)


def test_weights_in_half_precision_are_widened(
    vllm_engine: RunningEngine, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    push(vllm_engine, 1, publish(trained[0], tmp_path / "v1", torch.bfloat16))
    reference = load_reference(trained[0])
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    expected = reference_logprobs(reference, PROMPTS[0], TOKENS)
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=1) == pytest.approx(expected, abs=1e-4)


def test_adapters_go_and_come_back_with_the_base_model(
    vllm_engine: RunningEngine, tiny_model: Path, tiny_adapters: tuple[Path, Path], trained: tuple[Path, Path]
) -> None:
    load(vllm_engine, 1, tiny_adapters[0])
    push(vllm_engine, 2, trained[0])
    with pytest.raises(EngineRejects, match="version 1 is not loaded"):
        score(vllm_engine, PROMPTS[0], TOKENS, version=1)
    with pytest.raises(EngineRejects, match="full weights"):
        load(vllm_engine, 3, tiny_adapters[0])
    vllm_engine.loop.run(vllm_engine.engine.reset())
    load(vllm_engine, 1, tiny_adapters[0])
    expected = reference_logprobs(load_reference(tiny_model, tiny_adapters[0]), PROMPTS[0], TOKENS)
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=1) == pytest.approx(expected, abs=1e-3)


def test_requests_in_flight_end_on_the_weights_they_began_with(
    vllm_engine: RunningEngine, tiny_model: Path, trained: tuple[Path, Path]
) -> None:
    engine = vllm_engine.engine

    async def push_midway() -> tuple[list[Group], list[Group]]:
        old = asyncio.ensure_future(all_groups(engine.generate(PROMPTS[:1], ENDLESS, [[1, 2, 3, 4]], 0)))
        await all_groups(engine.generate(PROMPTS[:1], ENDLESS.model_copy(update={"max_tokens": 2}), [[9] * 4], 0))
        assert not old.done()
        loading = asyncio.ensure_future(engine.load_weights(1, trained[0]))
        await asyncio.wait({old, loading}, return_when=asyncio.FIRST_COMPLETED)
        assert old.done() and not loading.done()
        await loading
        return await old, await all_groups(engine.generate(PROMPTS[:1], ENDLESS, [[1, 2, 3, 4]], 1))

    for groups, model in zip(vllm_engine.loop.run(push_midway()), (tiny_model, trained[0]), strict=True):
        reference = load_reference(model)
        for completion in groups[0].completions:
            expected = reference_logprobs(reference, PROMPTS[0], completion.ids)
            assert completion.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 96}, "shape"),
        ({"num_hidden_layers": 3}, "are not the model's"),
        ({"num_hidden_layers": 1}, "missing"),
    ],
)
def test_another_models_weights_are_refused_and_nothing_changes(
    vllm_engine: RunningEngine, tiny_adapters: tuple[Path, Path], tmp_path: Path, changes: dict[str, int], reason: str
) -> None:
    load(vllm_engine, 1, tiny_adapters[0])
    before = [score(vllm_engine, PROMPTS[0], TOKENS, version=version) for version in (0, 1)]
    with pytest.raises(EngineRejects, match=reason):
        push(vllm_engine, 2, make_tiny_model(tmp_path / "other", **changes))
    assert [score(vllm_engine, PROMPTS[0], TOKENS, version=version) for version in (0, 1)] == before
