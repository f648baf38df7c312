from axolotl.utils.schemas.base import Options, null_means, option
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.resolve import resolve


def config(trl=None, vllm=None, **options):
    return resolve(
        AxolotlConfig(base_model="m", rl=options.pop("rl", "grpo"), trl=trl or {}, vllm=vllm or {}, **options)
    )


def test_null_comes_to_what_the_option_declares():
    class Section(Options):
        filled: int | None = option(None, "One that means something when empty.", null_means=7)
        left: int | None = option(None, "One that does not.")

    assert null_means(Section, "filled") == 7
    assert null_means(Section, "left") is None


def test_values_that_are_set_stay():
    resolved = config({"num_generations": 3, "top_k": 0, "beta": 0.0, "use_bias_correction_kl": False})
    assert (resolved.trl.num_generations, resolved.trl.top_k, resolved.trl.beta) == (3, 0, 0.0)
    assert resolved.trl.use_bias_correction_kl is False


def test_resolving_twice_changes_nothing():
    once = config({"vllm_importance_sampling_cap": 2.0, "vllm_server_host": "gpu"}, {"port": 9}, rl="gdpo")
    assert resolve(once) == once


def test_gdpo_is_grpo_with_rewards_normalised_first():
    assert config(rl="gdpo").trl.multi_objective_aggregation == "normalize_then_sum"
    assert config().trl.multi_objective_aggregation == "sum_then_normalize"


def test_the_server_trusts_what_the_trainer_trusts_unless_told_otherwise():
    assert config(trust_remote_code=True).vllm.trust_remote_code is True
    assert config({}, {"trust_remote_code": False}, trust_remote_code=True).vllm.trust_remote_code is False
    assert config().vllm.trust_remote_code is False


def test_data_sets_without_a_split():
    assert config(datasets=[{"path": "a"}, {"path": "b", "split": "test"}]).datasets[1].split == "test"
    assert config(datasets=[{"path": "a"}]).datasets[0].split == "train"


def test_scale_rewards_has_one_form():
    assert [config({"scale_rewards": word}).trl.scale_rewards for word in (True, False, "batch", "none")] == [
        "group",
        "none",
        "batch",
        "none",
    ]
