"""Each rule with a config that breaks it and one that just does not."""

import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.errors import ConfigError
from axolotl.serving.edge import MAX_N
from axolotl.utils.schemas.rules.server import MAX_SERVED_GROUP

LORA = {"adapter": "lora"}
BEST = {"load_best_model_at_end": True, "val_set_size": 8}


def findings(trl=None, vllm=None, **options):
    data = {
        "base_model": "m",
        "rl": "grpo",
        "micro_batch_size": 8,
        "datasets": [{"path": "a"}],
        **options,
        "trl": {"reward_funcs": ["r.f"], **(trl or {})},
        "vllm": vllm or {},
    }
    try:
        config_from_mapping(data)
    except ConfigError as error:
        return list(error.details)
    return []


AHEAD = {"use_vllm": True, "vllm_lora_sync": True, "use_data_producer": True, "async_prefetch": True}


@pytest.mark.parametrize(
    ("trl", "vllm", "options", "finding"),
    [
        ({"num_generations": 1}, {}, {}, "trl.num_generations: is 1; GRPO compares"),
        ({"temperature": 0.0}, {}, {}, "trl.temperature: is 0; training needs"),
        ({"reward_weights": [1.0, 2.0]}, {}, {}, "trl.reward_weights: has 2 weights for 1 reward functions"),
        ({"reward_funcs": []}, {}, {}, "trl.reward_funcs: is required"),
        ({}, {}, {"datasets": []}, "datasets: is required"),
        ({"async_prefetch": True}, {}, {}, "trl.async_prefetch: needs trl.use_data_producer: true"),
        ({"async_prefetch": True, "use_data_producer": True}, {}, {}, "trl.async_prefetch: needs trl.use_vllm: true"),
        (
            {**AHEAD, "prefetch_depth": 2, "vllm_sync_interval": 3, "max_staleness": 3},
            {},
            {"adapter": "lora"},
            "trl.max_staleness: is 3, but completions are up to 4 optimizer steps old",
        ),
        (
            {"num_iterations": 3, "max_staleness": 1},
            {},
            {},
            "trl.max_staleness: is 1, but completions are up to 2 optimizer steps old with this num_iterations;",
        ),
        (
            {"generation_batch_size": 3, "num_generations": 4},
            {},
            {},
            "trl.generation_batch_size: is 3, not a multiple of the 2 prompts that one optimizer step trains on "
            "(micro_batch_size 8 x gradient_accumulation_steps 1 / num_generations 4). Nearest valid: 2 or 4",
        ),
        (
            {"replay_buffer_size": 8, "replay_max_age": 3, "num_iterations": 4},
            {},
            {},
            "trl.replay_max_age: is 3, but a rollout is trained for 4 optimizer steps",
        ),
        ({"prefetch_depth": 2}, {}, {}, "trl.prefetch_depth: needs trl.use_data_producer: true"),
        ({"streaming_partial_batch": True}, {}, {}, "trl.streaming_partial_batch: needs trl.use_data_producer: true"),
        ({"streaming_min_groups": 2}, {}, {}, "trl.streaming_min_groups: needs trl.use_data_producer: true"),
        ({"vllm_lora_sync": True}, {}, {}, "trl.vllm_lora_sync: needs an adapter to send"),
        ({"weight_sync": "nccl", "vllm_lora_sync": True}, {}, LORA, "trl.weight_sync: is nccl, which carries all the"),
        ({"weight_sync": "nccl"}, {"engine": "transformers"}, {}, "trl.weight_sync: is nccl, which vllm.engine: trans"),
        ({"weight_sync": "nccl"}, {"device": "cpu"}, {}, "trl.weight_sync: is nccl, which needs a GPU"),
        ({"vllm_server_port": 8001}, {"port": 8000}, {}, "trl.vllm_server_port: is 8001, but vllm.port is 8000"),
        ({"vllm_server_host": "b"}, {"host": "a"}, {}, "trl.vllm_server_host: is b, but vllm.host is a"),
        ({"vllm_server_host": "b"}, {"host": "0.0.0.0"}, {}, "trl.vllm_server_host: is b, but vllm.host is 0.0.0.0"),
        ({"max_completion_length": 512}, {"max_model_len": 512}, {}, "trl.max_completion_length: leaves no room"),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
            {},
            {},
            "trl.vllm_importance_sampling_mode: is sequence_mask; loss_type vespo needs",
        ),
        (
            {"vllm_importance_sampling_clip_min": 3.0},
            {},
            {},
            "trl.vllm_importance_sampling_clip_min: is 3, which must be below vllm_importance_sampling_clip_max 3",
        ),
        ({"sync_ref_model": True, "beta": 0.1}, {}, LORA, "trl.sync_ref_model: needs full fine-tuning"),
        ({"sync_ref_model": True}, {}, {}, "trl.sync_ref_model: needs trl.beta above 0"),
        (
            {"multi_objective_aggregation": "sum_then_normalize"},
            {},
            {"rl": "gdpo"},
            "trl.multi_objective_aggregation: is sum_then_normalize, but rl: gdpo means",
        ),
        ({"vllm_lora_sync": True}, {}, LORA | {"peft_use_dora": True}, "peft_use_dora: cannot be combined"),
        ({"vllm_lora_sync": True}, {}, LORA | {"lora_bias": "all"}, "lora_bias: cannot be combined"),
        ({"vllm_lora_sync": True}, {}, LORA | {"lora_modules_to_save": ["x"]}, "lora_modules_to_save: cannot be"),
        (
            {"vllm_lora_sync": True},
            {},
            LORA | {"lora_target_modules": ["q_proj", "lm_head"]},
            "lora_target_modules: cannot hold lm_head",
        ),
        (
            {"vllm_lora_sync": True},
            {},
            LORA | {"lora_target_modules": "model.embed_tokens"},
            "lora_target_modules: cannot",
        ),
        ({}, {}, LORA | {"lora_target_modules": "model.lm_head"}, "lora_target_modules: cannot hold lm_head"),
        (
            {"use_vllm": True, "num_generations": 257},
            {},
            {"micro_batch_size": 257},
            "trl.num_generations: is 257; the server takes groups of up to 256",
        ),
        (
            {"vllm_lora_sync": True},
            {},
            LORA | {"peft_init_lora_weights": "pissa"},
            "peft_init_lora_weights: cannot be combined",
        ),
        ({"use_vllm": True}, {}, {"adapter": "qlora"}, "adapter: makes weights that a server cannot take as they are"),
        ({"beta": 0.1}, {}, LORA | {"lora_bias": "all"}, "lora_bias: changes the base model itself"),
        (
            {"beta": 0.1},
            {},
            LORA | {"peft_init_lora_weights": "olora"},
            "peft_init_lora_weights: changes the base model",
        ),
        ({"vllm_lora_sync": True}, {}, LORA | {"lora_r": 513}, "lora_r: is 513; the server takes ranks up to 512"),
        ({"vllm_server_host": "10.0.0.5"}, {"managed": True}, {}, "vllm.managed: starts a server on this machine"),
        ({}, {}, {"flash_attention": True, "eager_attention": True}, "eager_attention: cannot be combined with flash"),
        ({}, {}, {"bf16": True, "fp16": True}, "fp16: cannot be combined with bf16: true"),
        ({}, {}, {"saves_per_epoch": 2, "save_steps": 5}, "saves_per_epoch: cannot be combined with save_steps"),
        ({}, {}, {"evals_per_epoch": 2, "eval_steps": 5}, "evals_per_epoch: cannot be combined with eval_steps"),
        ({}, {}, {"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio: cannot be combined with warmup_steps"),
        ({}, {}, {"load_best_model_at_end": True}, "load_best_model_at_end: needs an evaluation"),
        ({}, {}, {"save_strategy": "best"}, "save_strategy: needs an evaluation; set val_set_size"),
        ({}, {}, {"lr_scheduler": "greedy"}, "lr_scheduler: needs an evaluation; set val_set_size"),
        (
            {},
            {},
            {"lr_scheduler": "reduce_lr_on_plateau", "val_set_size": 8, "eval_strategy": "no"},
            "lr_scheduler: needs an evaluation; set val_set_size, and no eval_strategy: no",
        ),
        ({}, {}, {"save_strategy": "best", "val_set_size": 8}, "save_strategy: is best; set metric_for_best_model"),
        (
            {},
            {},
            BEST | {"eval_steps": 5},
            "load_best_model_at_end: needs saving and evaluation in the same rhythm, not",
        ),
        (
            {},
            {},
            BEST | {"eval_steps": 5, "save_steps": 12},
            "load_best_model_at_end: needs save_steps 12 to be a multiple of eval_steps 5",
        ),
        (
            {},
            {},
            BEST | {"evals_per_epoch": 3, "saves_per_epoch": 2},
            "load_best_model_at_end: needs saves_per_epoch 2 and evals_per_epoch 3 to be equal",
        ),
        ({}, {}, {"load_in_4bit": True}, "load_in_4bit: needs an adapter"),
        (
            {},
            {},
            LORA | {"load_in_4bit": True, "load_in_8bit": True},
            "load_in_8bit: cannot be combined with load_in_4",
        ),
        ({}, {}, {"adapter": "qlora", "load_in_8bit": True}, "load_in_8bit: cannot be combined with adapter: qlora"),
        ({}, {}, {"plugins": ["a.B"]}, "plugins: are not supported; remove a.B"),
    ],
)
def test_a_rule_finds_what_it_is_about(trl, vllm, options, finding):
    found = findings(trl, vllm, **options)
    assert len(found) == 1, found
    assert finding in found[0]


@pytest.mark.parametrize(
    ("trl", "vllm", "options"),
    [
        ({}, {}, {}),
        ({"num_generations": 2}, {}, {}),
        ({"use_vllm": True, "num_generations": 256}, {}, {"micro_batch_size": 256}),
        ({"num_generations": 257}, {}, {"micro_batch_size": 257}),
        ({}, {}, LORA | {"lora_target_modules": ["embed_tokens"]}),
        ({"temperature": 0.01}, {}, {}),
        ({"reward_weights": [2.0]}, {}, {}),
        ({"prefetch_depth": 1, "streaming_min_groups": 1, "streaming_partial_batch": False}, {}, {}),
        ({**AHEAD, "prefetch_depth": 3, "max_staleness": 3}, {}, {"adapter": "lora"}),
        ({"vllm_lora_sync": True}, {}, LORA | {"lora_r": 512, "lora_target_modules": ["q_proj"]}),
        ({"use_vllm": True}, {}, LORA | {"peft_use_dora": True, "lora_bias": "all", "peft_init_lora_weights": "pissa"}),
        ({"vllm_lora_sync": True}, {}, LORA | {"peft_init_lora_weights": "gaussian"}),
        ({"vllm_lora_sync": True, "weight_sync": "auto"}, {"engine": "transformers", "device": "cpu"}, LORA),
        ({"weight_sync": "nccl"}, {"engine": "vllm", "device": "cuda"}, LORA),
        ({"weight_sync": "nccl"}, {}, {}),
        ({"use_vllm": True, "vllm_lora_sync": True}, {}, {"adapter": "qlora"}),
        ({}, {}, LORA | {"peft_use_dora": True, "lora_modules_to_save": ["lm_head"]}),
        ({"vllm_server_host": "127.0.0.1"}, {"host": "0.0.0.0"}, {}),
        ({"vllm_server_host": "0.0.0.0"}, {"host": "localhost"}, {}),
        ({"vllm_server_host": "Node7"}, {"host": "node7"}, {}),
        ({"max_completion_length": 511}, {"max_model_len": 512}, {}),
        ({"loss_type": "vespo"}, {}, {}),
        ({"vllm_importance_sampling_clip_min": 2.9}, {}, {}),
        ({"sync_ref_model": True, "beta": 0.1}, {}, {}),
        ({}, {"managed": True}, {}),
        ({}, {}, {"saves_per_epoch": 0, "save_steps": 0.5}),
        ({}, {}, {"adapter": "qlora", "load_in_4bit": True}),
        ({}, {}, {"adapter": ""}),
        ({}, {}, BEST | {"eval_steps": 5, "save_steps": 10}),
        ({}, {}, BEST | {"eval_steps": 0.1, "save_steps": 0.3}),
        ({}, {}, BEST | {"evals_per_epoch": 2, "saves_per_epoch": 2}),
        ({}, {}, {"lr_scheduler": "greedy", "val_set_size": 8}),
        ({}, {}, {"load_best_model_at_end": True, "val_set_size": 0.1}),
        ({}, {}, {"save_strategy": "best", "val_set_size": 0.1, "metric_for_best_model": "eval_reward"}),
    ],
)
def test_a_rule_leaves_the_rest_alone(trl, vllm, options):
    assert findings(trl, vllm, **options) == []


@pytest.mark.parametrize(
    ("micro", "steps", "group", "nearest"),
    [
        (3, 4, 8, "gradient_accumulation_steps 8, or micro_batch_size 2 or 4, or num_generations 6 or 12"),
        (2, 3, 4, "gradient_accumulation_steps 2 or 4, or micro_batch_size 4, or num_generations 3 or 6"),
        (1, 1, 8, "gradient_accumulation_steps 8, or micro_batch_size 8"),
        (10, 2, 8, "gradient_accumulation_steps 4, or micro_batch_size 8 or 12, or num_generations 5 or 10"),
    ],
)
def test_batches_that_tear_groups_apart(micro, steps, group, nearest):
    (found,) = findings({"num_generations": group}, micro_batch_size=micro, gradient_accumulation_steps=steps)
    equation = f"micro_batch_size {micro} x gradient_accumulation_steps {steps} = {micro * steps} completions"
    assert f"{equation}, not a multiple of trl.num_generations {group}" in found
    assert found.endswith(f"Nearest valid: {nearest}")


@pytest.mark.parametrize(("micro", "steps", "group"), [(2, 4, 8), (1, 8, 8), (16, 1, 8), (3, 8, 8), (6, 4, 8)])
def test_batches_of_whole_groups(micro, steps, group):
    assert findings({"num_generations": group}, micro_batch_size=micro, gradient_accumulation_steps=steps) == []


def test_the_limit_on_groups_is_the_servers():
    assert MAX_SERVED_GROUP == MAX_N


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"peft_use_dora": True}, "E-CFG-22"),
        ({"peft_use_dora": True, "lora_bias": "all"}, "E-CFG-22"),
        ({"lora_r": 513}, "E-CFG-21"),
        ({"lora_r": 513, "lora_bias": "all"}, "E-CFG-01"),
    ],
)
def test_problems_of_one_kind_have_its_code(options, code):
    data = {"base_model": "m", "rl": "grpo", "micro_batch_size": 8, "datasets": [{"path": "a"}], **LORA, **options}
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({**data, "trl": {"reward_funcs": ["r.f"], "use_vllm": True, "vllm_lora_sync": True}})
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
