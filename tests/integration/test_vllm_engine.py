"""The vLLM engine in this process, against transformers and PEFT on the same weights; then a server over it.

One engine serves the whole file, since starting one takes most of a minute; the last test kills it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from axolotl.errors import EnvironmentFault, ServerError
from axolotl.serving.engines import process_tree
from axolotl.serving.engines.protocol import EngineRejects
from axolotl.serving.wire import Completion, Group, Sampling
from tests.integration.conftest import RunningEngine, serve_on_loop
from tests.support.adapters import publish_random
from tests.support.groups import all_groups
from tests.support.protocol_suite import ProtocolSuite, Subject
from tests.support.reference import load_reference, reference_logprobs
from tests.support.tiny_model import make_random_adapter, make_tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

torch.set_num_threads(1)

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
#: Longer than two cache blocks of 32 tokens, so that prefix caching has something to share.
LONG_PROMPT = [3 + (index * 7) % 300 for index in range(70)]
TOKENS = [20, 300, 41, 7, 99, 350]


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> torch.nn.Module:
    return load_reference(tiny_model)


@pytest.fixture
def clean(vllm_engine: RunningEngine) -> RunningEngine:
    """The engine without adapters and with empty caches."""
    vllm_engine.loop.run(vllm_engine.engine.reset())
    return vllm_engine


def generate(
    running: RunningEngine,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    version: int = 0,
    **sampling: Any,
) -> list[Group]:
    options = Sampling(**{"n": len(seeds[0]), "max_tokens": 8, **sampling})
    return running.loop.run(all_groups(running.engine.generate(prompts, options, seeds, version)))


def score(
    running: RunningEngine, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0, version: int = 0
) -> list[float]:
    return running.loop.run(running.engine.score([prompt], [tokens], temperature, version))[0]


def load(running: RunningEngine, version: int, directory: Path) -> int:
    return running.loop.run(running.engine.load_adapter(version, directory))


def one(groups: list[Group]) -> Completion:
    return groups[0].completions[0]


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
    clean: RunningEngine, tiny_model: Path, tiny_adapters: tuple[Path, Path], base: torch.nn.Module
) -> None:
    assert load(clean, 1, tiny_adapters[0]) == 14, "seven linear layers in each of two blocks"
    expected = reference_logprobs(load_reference(tiny_model, tiny_adapters[0]), PROMPTS[0], TOKENS)
    unadapted = reference_logprobs(base, PROMPTS[0], TOKENS)
    assert max(abs(x - y) for x, y in zip(expected, unadapted, strict=True)) > 0.05
    assert score(clean, PROMPTS[0], TOKENS, version=1) == pytest.approx(expected, abs=1e-3)
    assert score(clean, PROMPTS[0], TOKENS, version=0) == pytest.approx(unadapted, abs=1e-3)


def test_versions_do_not_mix_in_one_batch_nor_in_the_prefix_cache(
    clean: RunningEngine, tiny_model: Path, tiny_adapters: tuple[Path, Path], base: torch.nn.Module
) -> None:
    load(clean, 1, tiny_adapters[0])
    load(clean, 2, tiny_adapters[1])
    models = [base, *(load_reference(tiny_model, adapter) for adapter in tiny_adapters)]
    sampling = Sampling(n=2, max_tokens=6)

    async def all_at_once() -> list[list[Group]]:
        engine = clean.engine
        return await asyncio.gather(
            *(all_groups(engine.generate([LONG_PROMPT], sampling, [[1, 2]], version)) for version in (0, 1, 2))
        )

    for _ in range(3):
        for model, groups in zip(models, clean.loop.run(all_at_once()), strict=True):
            for completion in groups[0].completions:
                expected = reference_logprobs(model, LONG_PROMPT, completion.ids)
                assert completion.logprobs == pytest.approx(expected, abs=1e-3)


def test_a_full_engine_refuses_another_version_until_one_is_unloaded(
    clean: RunningEngine, tiny_model: Path, tiny_adapters: tuple[Path, Path]
) -> None:
    for version in (1, 2, 3):
        load(clean, version, tiny_adapters[version % 2])
    with pytest.raises(EngineRejects, match=r"no free adapter slot: versions \[1, 2, 3\]"):
        load(clean, 4, tiny_adapters[0])
    clean.loop.run(clean.engine.unload_adapter(1))
    load(clean, 4, tiny_adapters[0])
    with pytest.raises(EngineRejects, match="version 1 is not loaded"):
        generate(clean, PROMPTS[:1], [[1]], version=1)
    expected = reference_logprobs(load_reference(tiny_model, tiny_adapters[0]), PROMPTS[0], TOKENS)
    assert score(clean, PROMPTS[0], TOKENS, version=4) == pytest.approx(expected, abs=1e-3)


def test_reset_goes_back_to_the_base_model(
    clean: RunningEngine, tiny_adapters: tuple[Path, Path], base: torch.nn.Module
) -> None:
    load(clean, 1, tiny_adapters[0])
    clean.loop.run(clean.engine.reset())
    with pytest.raises(EngineRejects, match="version 1 is not loaded"):
        score(clean, PROMPTS[0], TOKENS, version=1)
    assert score(clean, PROMPTS[0], TOKENS) == pytest.approx(reference_logprobs(base, PROMPTS[0], TOKENS), abs=1e-3)
    load(clean, 1, tiny_adapters[1])
    assert score(clean, PROMPTS[0], TOKENS, version=1) != pytest.approx(score(clean, PROMPTS[0], TOKENS), abs=0.01)


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
    clean: RunningEngine, tmp_path: Path, tiny_adapters: tuple[Path, Path], edit: Any, reason: str
) -> None:
    load(clean, 1, tiny_adapters[0])
    before = score(clean, PROMPTS[0], TOKENS, version=1)
    with pytest.raises(EngineRejects, match=reason):
        load(clean, 2, edited(tiny_adapters[1], tmp_path / "bad", edit))
    assert score(clean, PROMPTS[0], TOKENS, version=1) == before
    load(clean, 2, tiny_adapters[1])
    assert score(clean, PROMPTS[0], TOKENS, version=2) != pytest.approx(before, abs=0.01)


def test_an_adapter_of_too_high_a_rank_is_refused(clean: RunningEngine, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineRejects, match="rank 16"):
        load(clean, 1, make_random_adapter(tiny_model, tmp_path / "v1", rank=16))
    assert len(one(generate(clean, PROMPTS[:1], [[1]])).ids) > 0


def test_what_only_the_engine_itself_can_refuse_is_refused_by_it(
    clean: RunningEngine, tmp_path: Path, tiny_adapters: tuple[Path, Path]
) -> None:
    """An adapter that vLLM's own loader fails on: the error comes back through the engine process, which lives on."""

    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("q_proj", "w_proj"): tensor for name, tensor in tensors.items()}

    with pytest.raises(EngineRejects, match=r"^While loading the adapter.*w_proj") as caught:
        load(clean, 1, edited(tiny_adapters[0], tmp_path / "bad", renamed))
    assert str(tmp_path) not in str(caught.value)
    assert len(one(generate(clean, PROMPTS[:1], [[1]])).ids) > 0


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"n": 2}, "set trl.num_generations instead"),
        ({"temperature": 0.5}, "set trl.temperature instead"),
        ({"max_tokens": 5}, "set trl.max_completion_length instead"),
        ({"seed": 1}, "generation_kwargs.seed: decided by the server"),
        ({"logprobs": 5}, "generation_kwargs.logprobs: decided by the server"),
        ({"extra_args": {"a": 1}}, "generation_kwargs.extra_args: decided by the server"),
        ({"_eos_token_id": 1}, "decided by the server"),
        ({"no_such_thing": 1}, "generation_kwargs.no_such_thing"),
        ({"min_tokens": "many"}, "generation_kwargs.min_tokens"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"logit_bias": {"word": 1.0}}, "generation_kwargs.logit_bias"),
        ({"presence_penalty": 5.0}, "presence_penalty"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
    ],
)
def test_generation_kwargs_that_cannot_be_served_are_refused_by_name(
    vllm_engine: RunningEngine, extra: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineRejects, match=reason):
        generate(vllm_engine, PROMPTS[:1], [[1]], extra=extra)


def test_generation_kwargs_reach_the_sampler(vllm_engine: RunningEngine) -> None:
    prompt = PROMPTS[:1]
    free = one(generate(vllm_engine, prompt, [[1]])).ids
    stopped = one(generate(vllm_engine, prompt, [[1]], extra={"stop_token_ids": [free[2]]}))
    assert stopped.ids == free[: free.index(free[2]) + 1]
    assert stopped.finish_reason == "stop"
    allowed = one(generate(vllm_engine, prompt, [[1]], extra={"allowed_token_ids": [50, 51]}))
    assert set(allowed.ids) <= {50, 51}
    assert sum(torch.tensor(allowed.logprobs).exp() > 0.999) < len(allowed.ids), "renormalised over two tokens"
    biased = one(generate(vllm_engine, prompt, [[1]], extra={"logit_bias": {"77": 100.0}}))
    assert set(biased.ids) == {77}


def test_filters_and_penalties_reach_the_sampler(vllm_engine: RunningEngine, base: torch.nn.Module) -> None:
    prompt = PROMPTS[0]
    top = one(generate(vllm_engine, [prompt], [[4]], top_k=2)).ids
    context = list(prompt)
    for token in top:
        best = base(input_ids=torch.tensor([context])).logits[0, -1].topk(2).indices.tolist()
        assert token in best
        context.append(token)
    greedy = one(generate(vllm_engine, [prompt], [[4]], temperature=0.0)).ids
    assert one(generate(vllm_engine, [prompt], [[4]], top_p=1e-6)).ids == greedy
    assert one(generate(vllm_engine, [prompt], [[4]], min_p=1.0)).ids == greedy
    repeated = [greedy[0]] * 20
    plain = one(generate(vllm_engine, [repeated], [[4]], temperature=0.0)).ids
    assert one(generate(vllm_engine, [repeated], [[4]], temperature=0.0, repetition_penalty=50.0)).ids != plain


def test_a_regex_constrains_the_text(vllm_engine: RunningEngine) -> None:
    completion = one(generate(vllm_engine, PROMPTS[:1], [[1]], structured_regex="[0-9]{2,3}"))
    text = make_tiny_tokenizer().decode(completion.ids, skip_special_tokens=True)
    assert re.fullmatch("[0-9]{2,3}", text), text


@pytest.mark.parametrize("regex", ["([0-9", "a" * 5000])
def test_a_bad_regex_is_refused_and_the_engine_serves_on(vllm_engine: RunningEngine, regex: str) -> None:
    with pytest.raises(EngineRejects, match="regex"):
        generate(vllm_engine, PROMPTS[:1], [[1]], structured_regex=regex)
    assert len(one(generate(vllm_engine, PROMPTS[:1], [[1]])).ids) > 0


def test_cancelled_requests_leave_the_engine_free(clean: RunningEngine) -> None:
    """After a cancelled call nothing runs in the engine: only then can the prefix cache be cleared."""

    async def cancel_midway() -> None:
        sampling = Sampling(n=4, max_tokens=120, extra={"ignore_eos": True})
        task = asyncio.ensure_future(all_groups(clean.engine.generate(PROMPTS[:1], sampling, [[1, 2, 3, 4]], 0)))
        await all_groups(clean.engine.generate(PROMPTS[:1], Sampling(max_tokens=2), [[9]], 0))
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await clean.engine.reset()

    clean.loop.run(cancel_midway())


def test_a_reset_aborts_what_an_earlier_run_left_running(
    clean: RunningEngine, tiny_adapters: tuple[Path, Path]
) -> None:
    load(clean, 1, tiny_adapters[0])

    async def reset_midway() -> None:
        sampling = Sampling(n=4, max_tokens=120, extra={"ignore_eos": True})
        task = asyncio.ensure_future(all_groups(clean.engine.generate(PROMPTS[:1], sampling, [[1, 2, 3, 4]], 1)))
        await all_groups(clean.engine.generate(PROMPTS[:1], Sampling(max_tokens=2), [[9]], 1))
        assert not task.done()
        await clean.engine.reset()
        with pytest.raises(ServerError, match="gave up a request"):
            await task

    clean.loop.run(reset_midway())
    assert len(one(generate(clean, PROMPTS[:1], [[1]])).ids) > 0


@pytest.fixture(scope="module")
def subject(
    vllm_engine: RunningEngine, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    sync_dir = tmp_path_factory.mktemp("sync")
    vllm_engine.loop.run(vllm_engine.engine.reset())
    with serve_on_loop(vllm_engine, sync_dir) as server:
        yield Subject(
            server=server,
            fingerprint=vllm_engine.engine.fingerprint,
            max_model_len=128,
            publish=lambda run_id, version: publish_random(sync_dir, run_id, version, tiny_model),
            tolerance=1e-3,
        )


class TestVLLMServer(ProtocolSuite):
    pass


def test_a_dead_engine_is_an_error_and_leaves_no_process(vllm_engine: RunningEngine) -> None:
    """Stands last: it kills the engine that the tests above share."""
    engine, loop = vllm_engine.engine, vllm_engine.loop
    processes = set(engine.processes)
    (core,) = [process for process in processes if "EngineCore" in process.name()]

    async def die_midway() -> None:
        sampling = Sampling(n=4, max_tokens=120, extra={"ignore_eos": True})
        task = asyncio.ensure_future(all_groups(engine.generate(PROMPTS[:1], sampling, [[1, 2, 3, 4]], 0)))
        await all_groups(engine.generate(PROMPTS[:1], Sampling(max_tokens=2), [[9]], 0))
        core.kill()
        async with asyncio.timeout(60):
            with pytest.raises(ServerError, match="engine process died"):
                await task
            with pytest.raises(ServerError, match="engine process died"):
                await engine.score([PROMPTS[0]], [TOKENS], 1.0, 0)
            with pytest.raises(ServerError, match="engine process died"):
                await engine.reset()

    loop.run(die_midway())
    loop.run(engine.close())
    gone, alive = psutil.wait_procs(list(processes), timeout=10)
    assert not alive, json.dumps([process.as_dict(["pid", "name", "status"]) for process in alive])
    assert len(gone) == len(processes) >= 2
