import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.core.trainers.grpo.algo.importance import ImportanceSpec
from axolotl.core.trainers.grpo.specs import advantage_spec, importance_spec, sampling
from axolotl.utils.schemas.config import AxolotlConfig


def config(**trl: object) -> AxolotlConfig:
    base = {
        "base_model": "m",
        "rl": "grpo",
        "micro_batch_size": 8,
        "datasets": [{"path": "rows.jsonl"}],
        "adapter": "lora",
    }
    return config_from_mapping({**base, "trl": {"reward_funcs": ["r.one", "r.two"], **trl}})


def test_an_end_token_of_the_config_stops_generation_beside_those_of_the_user() -> None:
    drawn = sampling(config(generation_kwargs={"stop_token_ids": [9]}), end_token=4)
    assert drawn.extra == {"stop_token_ids": [9, 4]}
    assert sampling(config()).extra == {}
    assert sampling(config(), end_token=4).extra == {"stop_token_ids": [4]}


@pytest.mark.parametrize("name", ["stop_token_ids", "stop", "bad_words", "logit_bias", "min_tokens", "ignore_eos"])
def test_null_in_generation_kwargs_means_not_set(name: str) -> None:
    with_null = config(generation_kwargs={name: None})
    assert sampling(with_null).extra == {}
    assert sampling(with_null, end_token=4).extra == {"stop_token_ids": [4]}


@pytest.mark.parametrize("value", [7, "7", {"a": 1}])
def test_stop_tokens_that_are_no_list_are_left_for_the_engine_to_refuse(value: object) -> None:
    assert sampling(config(generation_kwargs={"stop_token_ids": value}), end_token=4).extra == {"stop_token_ids": value}


def test_the_importance_correction_needs_a_sampler_of_its_own() -> None:
    served = {"use_vllm": True, "vllm_lora_sync": True}
    assert importance_spec(config(**served)) == ImportanceSpec("token_truncate", 3.0, None)
    assert importance_spec(config(**served, vllm_importance_sampling_correction=False)) is None
    assert importance_spec(config(vllm_importance_sampling_correction=True)) is None


def test_reward_weights_default_to_one_each() -> None:
    assert advantage_spec(config(), 2).weights == (1.0, 1.0)
    assert advantage_spec(config(reward_weights=[1, 0.5]), 2).weights == (1.0, 0.5)
