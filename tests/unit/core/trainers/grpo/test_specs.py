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
    assert drawn.extra == {"stop_token_ids": [4, 9]}
    assert sampling(config()).extra == {}


def test_the_importance_correction_needs_a_sampler_of_its_own() -> None:
    served = {"use_vllm": True, "vllm_lora_sync": True}
    assert importance_spec(config(**served)) == ImportanceSpec("token_truncate", 3.0, None)
    assert importance_spec(config(**served, vllm_importance_sampling_correction=False)) is None
    assert importance_spec(config(vllm_importance_sampling_correction=True)) is None


def test_reward_weights_default_to_one_each() -> None:
    assert advantage_spec(config(), 2).weights == (1.0, 1.0)
    assert advantage_spec(config(reward_weights=[1, 0.5]), 2).weights == (1.0, 0.5)
