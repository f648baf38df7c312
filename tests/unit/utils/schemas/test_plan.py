from pathlib import Path

import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.utils.schemas.plan import BatchPlan, batch_plan, prompt_limit, server_url, staleness, sync_dir, uses_server


def config(trl=None, vllm=None, **options):
    return config_from_mapping(
        {
            "base_model": "m",
            "rl": "grpo",
            "micro_batch_size": 8,
            "datasets": [{"path": "a"}],
            "trl": {"reward_funcs": ["r.f"], **(trl or {})},
            "vllm": vllm or {},
            **options,
        }
    )


def test_the_guides_quick_start_trains_on_one_prompt_a_step():
    plan = batch_plan(config(micro_batch_size=2, gradient_accumulation_steps=4))
    assert plan == BatchPlan(8, 2, 4, completions_per_step=8, prompts_per_step=1)


def test_a_step_of_several_prompts():
    plan = batch_plan(config({"num_generations": 4}, micro_batch_size=6, gradient_accumulation_steps=10))
    assert (plan.completions_per_step, plan.prompts_per_step) == (60, 15)


@pytest.mark.parametrize(
    ("sequence_len", "max_model_len", "completion", "limit"),
    [(512, None, 512, 512), (512, 2048, 512, 512), (2000, 2048, 512, 1536), (800, 800, 512, 288), (9, 10, 9, 1)],
)
def test_prompts_share_the_models_length_with_completions(sequence_len, max_model_len, completion, limit):
    loaded = config({"max_completion_length": completion}, {"max_model_len": max_model_len}, sequence_len=sequence_len)
    assert prompt_limit(loaded) == limit


@pytest.mark.parametrize(
    ("trl", "vllm", "url"),
    [
        ({}, {}, "http://127.0.0.1:8000"),
        ({}, {"host": "0.0.0.0", "port": 9001}, "http://127.0.0.1:9001"),
        ({"vllm_server_host": "::", "vllm_server_port": 81}, {}, "http://127.0.0.1:81"),
        ({"vllm_server_host": "gpu-node"}, {}, "http://gpu-node:8000"),
        ({}, {"host": "::1"}, "http://[::1]:8000"),
    ],
)
def test_where_the_trainer_finds_the_server(trl, vllm, url):
    assert server_url(config(trl, vllm)) == url


@pytest.mark.parametrize(
    ("trl", "vllm", "listens"),
    [
        ({}, {}, ("127.0.0.1", 8000)),
        ({}, {"host": "0.0.0.0"}, ("0.0.0.0", 8000)),
        ({"vllm_server_host": "0.0.0.0"}, {}, ("127.0.0.1", 8000)),
        ({"vllm_server_host": "gpu-node", "vllm_server_port": 9000}, {}, ("gpu-node", 9000)),
    ],
)
def test_where_the_server_listens(trl, vllm, listens):
    loaded = config(trl, vllm)
    assert (loaded.vllm.host, loaded.vllm.port) == listens


def test_trainer_and_server_meet_in_a_directory_of_their_port(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert sync_dir(config({}, {"port": 9001})) == Path("/home/someone/.cache/axolotl/servers/9001")
    assert sync_dir(config({}, {"sync_dir": "~/shared"})) == Path("/home/someone/shared")
    assert sync_dir(config({}, {"sync_dir": "/mnt/x"})) == Path("/mnt/x")


@pytest.mark.parametrize(
    ("trl", "expected"), [({}, False), ({"use_vllm": True}, True), ({"use_vllm": True, "vllm_mode": "colocate"}, False)]
)
def test_who_generates(trl, expected):
    assert uses_server(config(trl)) is expected


def test_what_is_generated_together_feeds_several_steps():
    plan = batch_plan(config({"num_generations": 4, "generation_batch_size": 6, "num_iterations": 2}))
    assert (plan.prompts_per_step, plan.slices_per_rollout, plan.steps_per_rollout) == (2, 3, 6)


SERVED = {"use_vllm": True, "vllm_lora_sync": True, "use_data_producer": True}


@pytest.mark.parametrize(
    ("trl", "steps"),
    [
        ({}, 0),
        ({"num_iterations": 3}, 2),
        ({"num_iterations": 2, "generation_batch_size": 2}, 3),
        (SERVED, 0),
        (SERVED | {"vllm_sync_interval": 3}, 2),
        # Versions 1, 1, 5, 7, 7, 11 make the rollouts of steps 0, 2, 4, 6, 8, 10.
        (SERVED | {"vllm_sync_interval": 3, "num_iterations": 2}, 3),
        (SERVED | {"async_prefetch": True, "prefetch_depth": 2}, 2),
        (SERVED | {"async_prefetch": True, "prefetch_depth": 2, "num_iterations": 3}, 8),
    ],
)
def test_how_old_completions_get(trl, steps):
    assert staleness(config(trl, adapter="lora")) == steps
