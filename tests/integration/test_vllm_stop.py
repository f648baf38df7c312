"""What ends a vLLM engine: each test starts one of its own and kills it, beside the shared one that must not notice."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from axolotl.errors import ServerError
from axolotl.serving.engines import vllm
from tests.integration.conftest import running_vllm, vllm_settings
from tests.support.cli import free_port, running
from tests.support.disturbed import assert_nothing_left, disturbed, disturbed_project
from tests.support.groups import all_groups
from tests.support.project import make_project
from tests.support.reference import load_reference, reference_logprobs
from tests.support.running_engine import ENDLESS, PROMPTS, TOKENS, RunningEngine, score
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

torch.set_num_threads(1)


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_a_killed_process_is_an_error_and_takes_the_others_with_it(
    vllm_engine: RunningEngine, tiny_model: Path, victim: str
) -> None:
    before = score(vllm_engine, PROMPTS[0], TOKENS)
    with running_vllm(vllm_settings(tiny_model)) as own:
        engine = own.engine
        processes = set(engine.processes)
        assert len(processes) >= 2
        (killed,) = [process for process in processes if victim in process.name()]

        async def die_midway() -> str:
            death = asyncio.ensure_future(engine.died())
            task = asyncio.ensure_future(all_groups(engine.generate(PROMPTS[:1], ENDLESS, [[1, 2, 3, 4]], 0)))
            short = ENDLESS.model_copy(update={"max_tokens": 2})
            await all_groups(engine.generate(PROMPTS[:1], short, [[9] * 4], 0))
            assert not task.done() and not death.done()
            killed.kill()
            async with asyncio.timeout(5):
                reason = await death
            async with asyncio.timeout(60):
                with pytest.raises(ServerError, match="engine process died"):
                    await task
                with pytest.raises(ServerError, match="engine process died"):
                    await engine.score([PROMPTS[0]], [TOKENS], 1.0, 0)
                with pytest.raises(ServerError, match="engine process died"):
                    await engine.reset()
            return reason

        reason = own.loop.run(die_midway())
        assert victim in reason and f"pid {killed.pid}" in reason
        own.loop.run(engine.close())
        check_gone(processes)
    assert score(vllm_engine, PROMPTS[0], TOKENS) == before, "the other engine is untouched"


def test_a_reload_that_fails_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the check before would refuse: whatever it lets through, a failure inside vLLM is not survived.

    The engine is that of a full fine-tuning run: no adapters, and an output layer tied to the embedding, which is
    replaced with it.
    """
    base, trained = (make_tiny_model(tmp_path / f"{seed}", seed=seed, tie_word_embeddings=True) for seed in (1, 2))
    unfit = make_tiny_model(tmp_path / "unfit", intermediate_size=96)
    with running_vllm(dataclasses.replace(vllm_settings(base), max_lora_rank=0)) as own:
        engine = own.engine
        own.loop.run(engine.load_weights(1, trained))
        expected = reference_logprobs(load_reference(trained), PROMPTS[0], TOKENS)
        assert score(own, PROMPTS[0], TOKENS, version=1) == pytest.approx(expected, abs=1e-4)
        monkeypatch.setattr(vllm, "check_weights", lambda *arguments, **options: 1)

        async def fail() -> tuple[ServerError, str]:
            death = asyncio.ensure_future(engine.died())
            with pytest.raises(ServerError) as caught:
                await engine.load_weights(2, unfit)
            async with asyncio.timeout(5):
                return caught.value, await death

        error, reason = own.loop.run(fail())
        assert error.code == "E-SRV-23" and str(tmp_path) not in str(error.report())
        assert error.why in reason
        with pytest.raises(ServerError, match="failed to replace its weights"):
            score(own, PROMPTS[0], TOKENS, version=1)
        processes = set(engine.processes)
    check_gone(processes)


def test_a_server_whose_engine_is_killed_ends_with_everything_it_started(
    vllm_engine: RunningEngine, tiny_model: Path, tmp_path: Path
) -> None:
    before = score(vllm_engine, PROMPTS[0], TOKENS)
    options = {"engine": "vllm", "port": free_port(), "sync_dir": str(tmp_path / "sync"), "max_model_len": 128}
    make_project(tmp_path, tiny_model, trl__use_vllm=True, trl__vllm_lora_sync=True, vllm=options)
    with running(tmp_path, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after", timeout_s=400)
        front = psutil.Process(server.process.pid)
        family = {front, *front.children(recursive=True)}
        (core,) = [process for process in family if "EngineCore" in process.name()]
        core.kill()
        assert server.wait(10) == ServerError.exit_code
        check_gone(family)
        assert f"EngineCore (pid {core.pid})" in server.output
    assert score(vllm_engine, PROMPTS[0], TOKENS) == before, "the other engine is untouched"


def check_gone(processes: set[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(list(processes), timeout=10)
    left: list[dict[str, Any]] = [process.as_dict(["pid", "name", "status"]) for process in alive]
    assert not left, json.dumps(left)


def managed_vllm_project(directory: Path, model: Path, steps: int) -> None:
    options = {"vllm__engine": "vllm", "vllm__max_model_len": 384, "trl__vllm_server_timeout": 120}
    disturbed_project(directory, model, steps, **options)


def test_a_trainer_that_is_killed_takes_a_stopped_engine_along(
    vllm_engine: RunningEngine, tiny_model: Path, tmp_path: Path
) -> None:
    before = score(vllm_engine, PROMPTS[0], TOKENS)
    managed_vllm_project(tmp_path, tiny_model, 50)
    with disturbed(tmp_path) as killed:
        killed.wait_until(lambda: killed.num_scored > 0 and killed.is_generating(), "generation", timeout_s=400)
        core = killed.engine_child()
        assert core is not None
        core.suspend()
        killed.train.process.kill()
        killed.train.process.wait(10)
        assert_nothing_left(killed.mark)
        assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
    assert score(vllm_engine, PROMPTS[0], TOKENS) == before, "the other engine is untouched"


def test_a_run_that_ends_leaves_nothing_of_its_engine(
    vllm_engine: RunningEngine, tiny_model: Path, tmp_path: Path
) -> None:
    before = score(vllm_engine, PROMPTS[0], TOKENS)
    managed_vllm_project(tmp_path, tiny_model, 1)
    with disturbed(tmp_path) as ending:
        assert ending.train.wait(500) == 0, ending.train.output
        assert_nothing_left(ending.mark)
    assert list((tmp_path / "sync").iterdir()) == []
    assert score(vllm_engine, PROMPTS[0], TOKENS) == before, "the other engine is untouched"
