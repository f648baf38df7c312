import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.utils.schemas.availability import SEVERAL_RANKS, TRAINING, not_available
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.resolve import resolve

BASE = {"base_model": "m", "rl": "grpo", "micro_batch_size": 8, "datasets": [{"path": "a"}]}


def make(trl=None, vllm=None, **options):
    return config_from_mapping({**BASE, **options, "trl": {"reward_funcs": ["r.f"], **(trl or {})}, "vllm": vllm or {}})


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Whatever a library that another test used has put there."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("FSDP", "DEEPSPEED"):
        monkeypatch.delenv(f"ACCELERATE_USE_{name}", raising=False)


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("lora_model_dir", "a/b", "a/b"),
        ("streaming", True, "true"),
        ("fp8", True, "true"),
        ("gradient_checkpointing", "offload", "offload"),
        ("early_stopping_patience", 3, "3"),
        ("fsdp", ["full_shard"], '["full_shard"]'),
        ("fsdp_config", {"a": 1}, "{a: 1}"),
        ("deepspeed", "zero3.json", "zero3.json"),
    ],
)
def test_top_level_options_that_come_later(option, value, shown):
    (line,) = not_available(make(**{option: value}), "train")
    assert line.startswith(f"not available yet: {option}: {shown} (")
    assert not_available(make(**{option: value}), "vllm-serve") == []


def test_every_row_says_what_to_do_instead():
    assert all(row.instead for row in (*TRAINING, *SEVERAL_RANKS))


def test_no_default_is_refused():
    assert not_available(make(), "train") == []
    written_out = config_from_mapping(
        {
            name: value
            for name, value in resolve(AxolotlConfig(**BASE, trl={"reward_funcs": ["r.f"]})).model_dump().items()
            if name != "special_tokens"
        }
    )
    assert not_available(written_out, "train") == []


@pytest.mark.parametrize(("workers", "is_refused"), [(0, False), (1, False), (2, True)])
def test_reward_workers(workers, is_refused):
    assert bool(not_available(make({"reward_num_workers": workers}), "train")) is is_refused


def test_reward_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    assert not_available(make({"reward_funcs": ["pkg.module.f"]}), "train") == []
    for model in ("org/reward-model", "judge"):
        (line,) = not_available(make({"reward_funcs": ["r.f", model]}), "train")
        assert model in line


@pytest.mark.parametrize(
    ("launch", "refused"),
    [
        ({"WORLD_SIZE": "1"}, ""),
        ({"WORLD_SIZE": ""}, ""),
        ({"WORLD_SIZE": "2"}, "without a launcher"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ""),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ""),
        ({"WORLD_SIZE": "4", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "several machines: 2 of 4 processes"),
        ({"WORLD_SIZE": "2", "RANK": "1", "ACCELERATE_USE_FSDP": "true"}, "FSDP by accelerate"),
        ({"WORLD_SIZE": "2", "RANK": "1", "ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED by accelerate"),
    ],
)
def test_several_processes(monkeypatch, launch, refused):
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    lines = not_available(make(), "train")
    assert len(lines) == bool(refused) and refused in "".join(lines)
    assert not_available(make(), "vllm-serve") == []


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"val_set_size": 4}, "val_set_size"),
        ({"torch_compile": True}, "torch_compile"),
        ({"ddp_backend": "nccl"}, "ddp_backend"),
        ({"trl": {"log_completions": True}}, "trl.log_completions"),
        ({"trl": {"entropy_coef": 0.1}}, "trl.entropy_coef"),
        ({"trl": {"top_entropy_quantile": 0.5}}, "trl.top_entropy_quantile"),
        ({"trl": {"use_vllm": True}}, "trl.vllm_lora_sync"),
        (
            {"trl": {"use_data_producer": True, "replay_buffer_size": 4, "scale_rewards": "batch"}},
            "trl.replay_buffer_size",
        ),
    ],
)
def test_options_that_several_processes_refuse(monkeypatch, options, key):
    assert not_available(make(**options), "train") == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (line,) = not_available(make(**options), "train")
    assert line.startswith(f"not available yet: {key}: ") and line.endswith("or start one process")


@pytest.mark.parametrize(
    "trl",
    [
        {"beta": 0.1},
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "scale_rewards": False},
        {"vllm_importance_sampling_correction": False, "importance_sampling_level": "sequence"},
        {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_cap": 2.0},
        {"off_policy_mask_threshold": 0.5, "use_bias_correction_kl": False},
        {"mask_truncated_completions": True, "log_completions": True, "num_completions_to_print": 2},
        {"multi_objective_aggregation": "normalize_then_sum", "use_data_producer": True, "vllm_sync_interval": 5},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
        {"skip_zero_advantage_batches": True, "prefetch_depth": 1, "num_iterations": 2},
        {"generation_batch_size": 4, "num_generations": 4},
    ],
)
def test_what_works_now_is_not_refused(trl):
    assert not_available(make(trl, val_set_size=0.1), "train") == []
