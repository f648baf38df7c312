"""The vLLM engine in this process, against transformers and PEFT on the same weights.

All vLLM tests share one engine but those that harm it, since starting one takes most of a minute.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from axolotl.errors import EnvironmentFault, ServerError
from axolotl.serving.engines import process_tree
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import CANARY_VERSION, Group, Sampling
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
from tests.support.tiny_model import make_random_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> torch.nn.Module:
    return load_reference(tiny_model)


def test_what_the_engine_says_about_itself(vllm_engine: RunningEngine) -> None:
    engine = vllm_engine.engine
    assert (engine.name, engine.dtype, engine.max_model_len, engine.vocab_size) == ("vllm", "float32", 128, 384)
    assert engine.max_lora_rank == 8, "rank 6 is rounded up to a rank that vLLM takes"
    assert engine.fingerprint.summary["hidden_size"] == 64


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [({"max_model_len": 8192}, "E-ENV-05", "8192"), ({"device": "cuda"}, "E-ENV-03", "runs on cpu")],
)
def test_an_engine_that_cannot_start_says_why(
    vllm_engine: RunningEngine, change: dict[str, Any], code: str, reason: str
) -> None:
    from axolotl.serving.engines.vllm import VLLMEngine

    before = process_tree.children()
    with pytest.raises(EnvironmentFault) as caught:
        vllm_engine.loop.run(VLLMEngine.create(dataclasses.replace(vllm_engine.settings, **change)))
    assert caught.value.code == code
    assert reason in str(caught.value.report())
    assert process_tree.children() == before


def test_groups_come_in_order_with_one_logprob_a_token(vllm_engine: RunningEngine) -> None:
    groups = generate(vllm_engine, PROMPTS, [[1, 2], [3, 4], [5, 6]], max_tokens=6)
    assert [group.index for group in groups] == [0, 1, 2]
    completions = [completion for group in groups for completion in group.completions]
    assert len(completions) == 6
    assert len({tuple(completion.ids) for completion in completions}) == 6, "different seeds, different tokens"
    for completion in completions:
        assert 1 <= len(completion.ids) <= 6
        assert len(completion.ids) == len(completion.logprobs)
        assert completion.finish_reason == ("length" if completion.ids[-1] != 2 else "stop")


def test_a_completion_depends_on_its_seed_and_not_on_its_batch(vllm_engine: RunningEngine) -> None:
    batch = generate(vllm_engine, PROMPTS, [[11, 900], [7, 2**63 - 1], [0, 5]])
    for prompt, group, seeds in zip(PROMPTS, batch, [[11, 900], [7, 2**63 - 1], [0, 5]], strict=True):
        for completion, seed in zip(group.completions, seeds, strict=True):
            alone = one(generate(vllm_engine, [prompt], [[seed]]))
            assert alone.ids == completion.ids
            assert alone.logprobs == pytest.approx(completion.logprobs, abs=1e-4)
    reversed_batch = generate(vllm_engine, PROMPTS[::-1], [[5, 0], [2**63 - 1, 7], [900, 11]])
    assert [completion.ids for completion in reversed_batch[2].completions] == [
        completion.ids for completion in batch[0].completions[::-1]
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    vllm_engine: RunningEngine, base: torch.nn.Module, temperature: float
) -> None:
    for group, prompt in zip(
        generate(vllm_engine, PROMPTS, [[1, 2]] * 3, temperature=temperature), PROMPTS, strict=True
    ):
        for completion in group.completions:
            expected = reference_logprobs(base, prompt, completion.ids, temperature)
            assert completion.logprobs == pytest.approx(expected, abs=1e-3)


def test_temperature_zero_is_greedy(vllm_engine: RunningEngine, base: torch.nn.Module) -> None:
    completion = one(generate(vllm_engine, [PROMPTS[0]], [[3]], temperature=0.0, max_tokens=4))
    context = list(PROMPTS[0])
    for token in completion.ids:
        assert token == int(base(input_ids=torch.tensor([context])).logits[0, -1].argmax())
        context.append(token)
    assert completion.logprobs == pytest.approx(reference_logprobs(base, PROMPTS[0], completion.ids), abs=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_score_is_a_forward_of_the_model(vllm_engine: RunningEngine, base: torch.nn.Module, temperature: float) -> None:
    scores = vllm_engine.loop.run(
        vllm_engine.engine.score([PROMPTS[0], LONG_PROMPT, [9]], [TOKENS, TOKENS[:1], TOKENS[::-1]], temperature, 0)
    )
    assert scores[0] == pytest.approx(reference_logprobs(base, PROMPTS[0], TOKENS, temperature), abs=1e-3)
    assert scores[1] == pytest.approx(reference_logprobs(base, LONG_PROMPT, TOKENS[:1], temperature), abs=1e-3)
    assert scores[2] == pytest.approx(reference_logprobs(base, [9], TOKENS[::-1], temperature), abs=1e-3)


def test_score_at_temperature_zero_is_that_at_one(vllm_engine: RunningEngine) -> None:
    assert score(vllm_engine, PROMPTS[0], TOKENS, 0.0) == score(vllm_engine, PROMPTS[0], TOKENS, 1.0)


def test_score_of_a_row_that_fills_the_models_length(vllm_engine: RunningEngine, base: torch.nn.Module) -> None:
    tokens = [(index * 11) % 380 for index in range(128 - len(LONG_PROMPT))]
    expected = reference_logprobs(base, LONG_PROMPT, tokens)
    assert score(vllm_engine, LONG_PROMPT, tokens) == pytest.approx(expected, abs=1e-3)


def test_scoring_and_sampling_share_a_step(vllm_engine: RunningEngine, base: torch.nn.Module) -> None:
    engine = vllm_engine.engine
    sampling = Sampling(n=2, max_tokens=12, temperature=0.9)

    async def both() -> tuple[list[Group], list[list[float]]]:
        return await asyncio.gather(
            all_groups(engine.generate(PROMPTS, sampling, [[1, 2]] * 3, 0)),
            engine.score([LONG_PROMPT], [TOKENS], 1.3, 0),
        )

    groups, scores = vllm_engine.loop.run(both())
    assert scores[0] == pytest.approx(reference_logprobs(base, LONG_PROMPT, TOKENS, 1.3), abs=1e-3)
    for group, prompt in zip(groups, PROMPTS, strict=True):
        for completion in group.completions:
            assert completion.logprobs == pytest.approx(reference_logprobs(base, prompt, completion.ids, 0.9), abs=1e-3)


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_does_not_serve_are_refused(vllm_engine: RunningEngine, temperature: float) -> None:
    with pytest.raises(EngineRejects, match="temperature"):
        score(vllm_engine, PROMPTS[0], TOKENS, temperature)
    with pytest.raises(EngineRejects, match="temperature"):
        generate(vllm_engine, PROMPTS[:1], [[1]], temperature=temperature)


def test_an_adapter_gives_pefts_logprobs(
    vllm_engine: RunningEngine, tiny_model: Path, tiny_adapters: tuple[Path, Path], base: torch.nn.Module
) -> None:
    assert load(vllm_engine, 1, tiny_adapters[0]) == 14, "seven linear layers in each of two blocks"
    expected = reference_logprobs(load_reference(tiny_model, tiny_adapters[0]), PROMPTS[0], TOKENS)
    unadapted = reference_logprobs(base, PROMPTS[0], TOKENS)
    assert max(abs(x - y) for x, y in zip(expected, unadapted, strict=True)) > 0.05
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=1) == pytest.approx(expected, abs=1e-3)
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=0) == pytest.approx(unadapted, abs=1e-3)


def test_versions_do_not_mix_in_one_batch_nor_in_the_prefix_cache(
    vllm_engine: RunningEngine, tiny_model: Path, tiny_adapters: tuple[Path, Path], base: torch.nn.Module
) -> None:
    load(vllm_engine, 1, tiny_adapters[0])
    load(vllm_engine, 2, tiny_adapters[1])
    models = [base, *(load_reference(tiny_model, adapter) for adapter in tiny_adapters)]
    sampling = Sampling(n=2, max_tokens=6)

    async def all_at_once() -> list[list[Group]]:
        engine = vllm_engine.engine
        return await asyncio.gather(
            *(all_groups(engine.generate([LONG_PROMPT], sampling, [[1, 2]], version)) for version in (0, 1, 2))
        )

    for _ in range(3):
        for model, groups in zip(models, vllm_engine.loop.run(all_at_once()), strict=True):
            for completion in groups[0].completions:
                expected = reference_logprobs(model, LONG_PROMPT, completion.ids)
                assert completion.logprobs == pytest.approx(expected, abs=1e-3)


def test_the_base_model_has_no_adapter_in_a_batch_with_others_while_every_slot_is_taken(
    vllm_engine: RunningEngine, tiny_adapters: tuple[Path, Path], base: torch.nn.Module
) -> None:
    for version in (1, 2, 3):
        load(vllm_engine, version, tiny_adapters[version % 2])

    async def all_at_once() -> list[list[Group]]:
        sampling = Sampling(n=2, max_tokens=6)
        return await asyncio.gather(
            *(
                all_groups(vllm_engine.engine.generate([LONG_PROMPT], sampling, [[1, 2]], version))
                for version in (0, 1, 2, 3)
            )
        )

    for completion in vllm_engine.loop.run(all_at_once())[0][0].completions:
        expected = reference_logprobs(base, LONG_PROMPT, completion.ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-3)


def test_a_full_engine_refuses_another_version_until_one_is_unloaded(
    vllm_engine: RunningEngine, tiny_model: Path, tiny_adapters: tuple[Path, Path]
) -> None:
    for version in (1, 2, 3):
        load(vllm_engine, version, tiny_adapters[version % 2])
    with pytest.raises(EngineRejects, match=r"no free adapter slot: versions \[1, 2, 3\]"):
        load(vllm_engine, 4, tiny_adapters[0])
    vllm_engine.loop.run(vllm_engine.engine.unload_adapter(1))
    load(vllm_engine, 4, tiny_adapters[0])
    with pytest.raises(EngineRejects, match="version 1 is not loaded"):
        generate(vllm_engine, PROMPTS[:1], [[1]], version=1)
    expected = reference_logprobs(load_reference(tiny_model, tiny_adapters[0]), PROMPTS[0], TOKENS)
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=4) == pytest.approx(expected, abs=1e-3)


def test_reset_goes_back_to_the_base_model(
    vllm_engine: RunningEngine, tiny_adapters: tuple[Path, Path], base: torch.nn.Module
) -> None:
    load(vllm_engine, 1, tiny_adapters[0])
    vllm_engine.loop.run(vllm_engine.engine.reset())
    with pytest.raises(EngineRejects, match="version 1 is not loaded"):
        score(vllm_engine, PROMPTS[0], TOKENS, version=1)
    assert score(vllm_engine, PROMPTS[0], TOKENS) == pytest.approx(
        reference_logprobs(base, PROMPTS[0], TOKENS), abs=1e-3
    )
    load(vllm_engine, 1, tiny_adapters[1])
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=1) != pytest.approx(
        score(vllm_engine, PROMPTS[0], TOKENS), abs=0.01
    )


def edited(adapter: Path, directory: Path, edit: Any) -> Path:
    """A copy of `adapter` in `directory` with its tensors passed through `edit`."""
    shutil.copytree(adapter, directory)
    file = directory / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in edit(load_file(file)).items()}, file)
    return directory


def narrowed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[:, :32] if "q_proj.lora_A" in name else tensor for name, tensor in tensors.items()}


def moved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()}


def poisoned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * float("nan") if "v_proj" in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (narrowed, r"q_proj.*shape \[64, 32\], the base model's is \[64, 64\]"),
        (moved, r"7 modules of the adapter are not in the model: .*layers\.7"),
        (poisoned, "not finite"),
        (lambda tensors: {}, "no tensor"),
    ],
    ids=["narrow", "other-layer", "nan", "empty"],
)
def test_a_bad_adapter_is_refused_and_the_engine_serves_on(
    vllm_engine: RunningEngine, tmp_path: Path, tiny_adapters: tuple[Path, Path], edit: Any, reason: str
) -> None:
    load(vllm_engine, 1, tiny_adapters[0])
    before = score(vllm_engine, PROMPTS[0], TOKENS, version=1)
    with pytest.raises(EngineRejects, match=reason):
        load(vllm_engine, 2, edited(tiny_adapters[1], tmp_path / "bad", edit))
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=1) == before
    load(vllm_engine, 2, tiny_adapters[1])
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=2) != pytest.approx(before, abs=0.01)


def test_an_adapter_of_too_high_a_rank_is_refused(vllm_engine: RunningEngine, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineRejects, match="rank 16"):
        load(vllm_engine, 1, make_random_adapter(tiny_model, tmp_path / "v1", rank=16))
    assert len(one(generate(vllm_engine, PROMPTS[:1], [[1]])).ids) > 0


def test_what_only_the_engine_itself_can_refuse_is_refused_by_it(
    vllm_engine: RunningEngine, tmp_path: Path, tiny_adapters: tuple[Path, Path]
) -> None:
    """An adapter that vLLM's own loader fails on: the error comes back through the engine process, which lives on."""

    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("q_proj", "w_proj"): tensor for name, tensor in tensors.items()}

    with pytest.raises(EngineRejects, match=r"^While loading the adapter.*w_proj") as caught:
        load(vllm_engine, 1, edited(tiny_adapters[0], tmp_path / "bad", renamed))
    assert str(tmp_path) not in str(caught.value)
    assert len(one(generate(vllm_engine, PROMPTS[:1], [[1]])).ids) > 0


def test_cancelled_requests_leave_the_engine_free(vllm_engine: RunningEngine) -> None:
    """After a cancelled call nothing runs in the engine: only then can the prefix cache be cleared."""

    async def cancel_midway() -> None:
        task = asyncio.ensure_future(all_groups(vllm_engine.engine.generate(PROMPTS[:1], ENDLESS, [[1, 2, 3, 4]], 0)))
        await all_groups(vllm_engine.engine.generate(PROMPTS[:1], Sampling(max_tokens=2), [[9]], 0))
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await vllm_engine.engine.reset()

    vllm_engine.loop.run(cancel_midway())


def test_a_reset_aborts_what_an_earlier_run_left_running(
    vllm_engine: RunningEngine, tiny_adapters: tuple[Path, Path]
) -> None:
    load(vllm_engine, 1, tiny_adapters[0])

    async def reset_midway() -> None:
        task = asyncio.ensure_future(all_groups(vllm_engine.engine.generate(PROMPTS[:1], ENDLESS, [[1, 2, 3, 4]], 1)))
        await all_groups(vllm_engine.engine.generate(PROMPTS[:1], Sampling(max_tokens=2), [[9]], 1))
        assert not task.done()
        await vllm_engine.engine.reset()
        with pytest.raises(ServerError, match="gave up a request"):
            await task

    vllm_engine.loop.run(reset_midway())
    assert len(one(generate(vllm_engine, PROMPTS[:1], [[1]])).ids) > 0


def test_a_group_does_not_wait_for_a_longer_one(vllm_engine: RunningEngine) -> None:
    """The second prompt leaves room for fewer tokens, so it ends first; closing the stream ends the other."""

    async def first_of_two() -> tuple[Group, int]:
        engine = vllm_engine.engine
        stream = engine.generate([PROMPTS[0], LONG_PROMPT], ENDLESS, [[1, 2, 3, 4]] * 2, 0)
        async with aclosing(stream):
            group = await anext(stream)
        generated = engine.progress().generated
        # Only an engine that holds no request can clear its caches.
        await engine.reset()
        return group, generated

    before = vllm_engine.engine.progress().generated
    group, generated = vllm_engine.loop.run(first_of_two())
    room = 128 - len(LONG_PROMPT)
    assert group.index == 1 and [len(completion.ids) for completion in group.completions] == [room] * 4
    assert generated - before < 4 * (room + 120), "the first prompt's completions were cut off"


def test_progress_counts_what_is_computed(vllm_engine: RunningEngine) -> None:
    engine = vllm_engine.engine
    before = engine.progress()
    groups = generate(vllm_engine, PROMPTS, [[1, 2], [3, 4], [5, 6]], max_tokens=6)
    after = engine.progress()
    sampled = sum(len(completion.ids) for group in groups for completion in group.completions)
    assert after.generated - before.generated == sampled
    assert after.work - before.work == sampled + 2 * sum(len(prompt) for prompt in PROMPTS)


def test_progress_grows_within_a_request_and_stands_still_with_the_engine(vllm_engine: RunningEngine) -> None:
    engine = vllm_engine.engine
    (core,) = [process for process in engine.processes if "EngineCore" in process.name()]

    async def rises_above(work: int) -> int:
        async with asyncio.timeout(30):
            while engine.progress().work <= work:
                await asyncio.wait({task}, timeout=0.01)
        return engine.progress().work

    async def watch() -> None:
        nonlocal task
        start = engine.progress().work
        task = asyncio.ensure_future(all_groups(engine.generate(PROMPTS[:1], ENDLESS, [[1, 2, 3, 4]], 0)))
        await rises_above(await rises_above(start))
        assert not task.done()
        core.send_signal(signal.SIGSTOP)
        try:
            # What it had sent before arrives; the second interval is its silence.
            await asyncio.wait({task}, timeout=0.5)
            still = engine.progress()
            await asyncio.wait({task}, timeout=1)
            assert engine.progress() == still and not task.done()
        finally:
            core.send_signal(signal.SIGCONT)
        await rises_above(still.work)
        (group,) = await task
        assert [len(completion.ids) for completion in group.completions] == [120] * 4

    task: asyncio.Task[list[Group]]
    vllm_engine.loop.run(watch())


def test_vllms_own_metrics_are_in_the_registry(vllm_engine: RunningEngine) -> None:
    from prometheus_client import REGISTRY, generate_latest

    def generated() -> float:
        lines = generate_latest(REGISTRY).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))

    before = generated()
    completion = one(generate(vllm_engine, PROMPTS[:1], [[1]]))
    assert generated() - before == len(completion.ids)


def test_the_canarys_number_is_a_version_like_others(
    vllm_engine: RunningEngine, tiny_model: Path, tiny_adapters: tuple[Path, Path]
) -> None:
    load(vllm_engine, CANARY_VERSION, tiny_adapters[0])
    expected = reference_logprobs(load_reference(tiny_model, tiny_adapters[0]), PROMPTS[0], TOKENS)
    assert score(vllm_engine, PROMPTS[0], TOKENS, version=CANARY_VERSION) == pytest.approx(expected, abs=1e-3)
    vllm_engine.loop.run(vllm_engine.engine.unload_adapter(CANARY_VERSION))
    with pytest.raises(EngineRejects, match="not loaded"):
        score(vllm_engine, PROMPTS[0], TOKENS, version=CANARY_VERSION)


def test_an_unloaded_adapter_is_gone_from_the_engine(
    vllm_engine: RunningEngine, tiny_adapters: tuple[Path, Path]
) -> None:
    load(vllm_engine, 1, tiny_adapters[0])
    load(vllm_engine, 2, tiny_adapters[1])
    vllm_engine.loop.run(vllm_engine.engine.unload_adapter(1))
    assert vllm_engine.loop.run(vllm_engine.engine._llm.list_loras()) == [2]
