from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axolotl.cli.config import config_from_mapping, dump_config, load_config
from axolotl.cli.source import read_tree
from axolotl.errors import ConfigError
from axolotl.utils.schemas.legacy import RENAMED
from axolotl.utils.schemas.scalars import read_free, read_text
from tests.unit.cli.conftest import MINIMAL

PUBLIC_CONFIGS = sorted((Path(__file__).resolve().parents[4] / "shared" / "configs").glob("*.yaml"))


def test_every_problem_is_reported_at_once_in_the_order_of_the_lines(problems):
    text = """\
base_model: some/model
rl: gpro
seed: x
seed: 1
trl:
  num_generation: 4
  beta: -1
  reward_funcs: [rewards.a]
  reward_weights: [1.0, 2.0]
  temperature: 0
datasets:
  - path: a
    splits: train
"""
    assert problems(text) == (
        "c.yaml:2 rl: must be one of grpo, gdpo, not gpro. Did you mean grpo?",
        "c.yaml:3 seed: needs a whole number, not x",
        "c.yaml:4 seed: repeats the key of line 3",
        "c.yaml:6 trl.num_generation: unknown key. Did you mean num_generations?",
        "c.yaml:7 trl.beta: must be at least 0, not -1",
        "c.yaml:9 trl.reward_weights: has 2 weights for 1 reward functions; give one weight a function",
        "c.yaml:10 trl.temperature: is 0; training needs completions that differ, so a temperature above 0",
        "c.yaml:13 datasets.0.splits: unknown key. Did you mean split?",
    )


def test_a_server_that_reports_every_second_needs_seconds_to_be_heard(problems, load):
    assert problems(MINIMAL + "  vllm_server_timeout: 4\n") == (
        "c.yaml:8 trl.vllm_server_timeout: must be at least 5, not 4",
    )
    assert load(MINIMAL + "  vllm_server_timeout: 5\n").config.trl.vllm_server_timeout == 5


def test_a_rule_is_silent_about_options_that_are_wrong_in_themselves(problems):
    text = MINIMAL.replace("micro_batch_size: 8", "micro_batch_size: eight")
    assert problems(text) == ("c.yaml:3 micro_batch_size: needs a whole number, not eight",)


def test_what_is_missing(problems):
    assert problems("seed: 1\n") == (
        "c.yaml base_model: is required",
        "c.yaml rl: is required: set rl: grpo",
        "c.yaml datasets: is required: list at least one data set with its path",
        "c.yaml trl.reward_funcs: is required: list at least one reward function, such as rewards.accuracy_reward",
        "c.yaml micro_batch_size: micro_batch_size 1 x gradient_accumulation_steps 1 = 1 completions, not a multiple "
        "of trl.num_generations 8 (every process trains on whole groups). Nearest valid: gradient_accumulation_steps "
        "8, or micro_batch_size 8",
    )


def test_a_server_needs_no_data_and_no_rewards(config_file):
    path = config_file("base_model: some/model\nrl: grpo\nvllm: {port: 9000}\n")
    assert load_config(path, purpose="vllm-serve").config.vllm.port == 9000


@pytest.mark.parametrize(("name", "what"), [("nope.yaml", "nope.yaml does not exist"), (".", ". is a directory")])
def test_files_that_cannot_be_read(tmp_path, monkeypatch, name, what):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=what) as caught:
        load_config(name)
    assert caught.value.exit_code == 2


def test_empty_values_mean_the_default(load):
    text = MINIMAL + "  temperature:\n  num_generations: null\n  use_vllm: ~\nvllm:\noptimizer:\nwandb_entity:\n"
    config = load(text).config
    assert (config.trl.temperature, config.trl.num_generations, config.trl.use_vllm) == (1.0, 8, False)
    assert (config.optimizer, config.wandb_entity, config.vllm.engine) == ("adamw_torch_fused", None, "auto")


class TestOverrides:
    def test_they_win_over_the_file(self, load):
        config = load(MINIMAL + "seed: 1\n", ("seed", "2"), ("trl.num_generations", "4")).config
        assert (config.seed, config.trl.num_generations) == (2, 4)

    def test_values_are_read_like_those_of_the_file(self, load):
        config = load(
            MINIMAL,
            ("learning_rate", "1e-5"),
            ("trl.vllm_lora_sync", "true"),
            ("adapter", "lora"),
            ("trl.reward_funcs", "[rewards.a, rewards.b]"),
            ("trl.generation_kwargs", "{stop: ['#']}"),
            ("wandb_name", "run #3: a"),
            ("wandb_project", "'true'"),
            ("max_steps", "null"),
        ).config
        assert config.learning_rate == 1e-5
        assert config.trl.vllm_lora_sync is True
        assert config.trl.reward_funcs == ["rewards.a", "rewards.b"]
        assert config.trl.generation_kwargs == {"stop": ["#"]}
        assert (config.wandb_name, config.wandb_project, config.max_steps) == ("run #3: a", "true", None)

    def test_an_entry_of_a_list(self, load):
        assert load(MINIMAL, ("datasets.0.path", "other.jsonl")).config.datasets[0].path == "other.jsonl"

    def test_a_section_that_the_file_leaves_empty(self, load):
        assert load(MINIMAL + "vllm:\n", ("vllm.managed", "true")).config.vllm.managed is True

    @pytest.mark.parametrize(
        ("key", "value", "finding"),
        [
            ("lerning_rate", "1", "--lerning_rate: unknown key. Did you mean learning_rate?"),
            ("beta", "1", "--beta: unknown key; it belongs under trl:"),
            ("trl.beta", "x", "--trl.beta: needs a number, not x"),
            ("trl.beta.x", "1", "--trl.beta.x: "),
            ("datasets.3.path", "x", "--datasets.3.path: there is no entry 3"),
            ("datasets.3", "x", "--datasets.3: there is no entry 3"),
            ("seed.x", "1", "--seed.x: seed has no options of its own"),
            ("trl", "5", "--trl: needs options of its own"),
            ("trl.reward_weights", "[1, 2]", "--trl.reward_weights: has 2 weights for 1 reward functions"),
            ("trl.reward_weights", "[1, x]", "--trl.reward_weights: trl.reward_weights.1 needs a number, not x"),
            ("gc_step", "1", "--gc_step: unknown key"),
        ],
    )
    def test_errors_name_the_flag(self, problems, key, value, finding):
        text = MINIMAL + "  beta: 0.1\nseed: 3\n"
        assert any(line.startswith(finding) for line in problems(text, (key, value)))

    def test_broken_yaml_in_a_value(self, load):
        with pytest.raises(ConfigError, match=r"--trl\.reward_funcs: \[a is not valid YAML"):
            load(MINIMAL, ("trl.reward_funcs", "[a"))

    def test_an_older_name_as_a_flag(self, load):
        loaded = load(MINIMAL, ("lr_scheduler_type", "linear"))
        assert loaded.config.lr_scheduler == "linear"
        assert loaded.warnings == ("--lr_scheduler_type: is an older name; today's key is lr_scheduler",)

    def test_a_flag_of_the_command_that_is_misspelt(self, config_file):
        with pytest.raises(ConfigError) as caught:
            load_config(config_file(MINIMAL), [("dryrun", "true")], own_flags=("dry_run",))
        assert caught.value.details == ("--dryrun: unknown key. Did you mean dry_run?",)


class TestAnyInput:
    """Whatever is written, it is a config or a `ConfigError`."""

    VALUES = st.sampled_from(
        ["true", "~", "[]", "{}", "[1, x]", "{a: 1}", "-1", "0", ".nan", "''", "|", "*a", "!t", "017", "9" * 30, "- a"]
    )
    KEYS = st.sampled_from(
        "rl trl vllm datasets seed special_tokens reward_funcs gc_steps lr_scheduler_type plugins".split(" ")  # noqa: SIM905
    )

    @given(st.lists(st.tuples(KEYS, VALUES), max_size=4), st.lists(st.tuples(KEYS, VALUES), max_size=2))
    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_it_is_read_or_refused(self, config_file, lines, overrides):
        path = config_file(MINIMAL + "".join(f"{key}: {value}\n" for key, value in lines))
        try:
            loaded = load_config(path, [(f"trl.{key}", value) for key, value in overrides])
        except ConfigError:
            return
        assert loaded.config.base_model == "some/model"


class TestPublicConfigs:
    """Configs that other people wrote; each key of them either counts, or is warned about with its line."""

    def _by_name(self, name):
        (path,) = [path for path in PUBLIC_CONFIGS if path.stem == name] or [None]
        if path is None:
            pytest.skip("the public configs are not here")
        return path

    @pytest.mark.parametrize(
        "name",
        [
            "cookbook_grpo_code",
            "cookbook_gsm8k",
            "grpo_code_custom_dataset",
            "gsm8k_qwen3_8b_issue",
            "qlora_1b_gdpo",
            "r1_acecode",
        ],
    )
    def test_it_loads_and_no_key_is_lost(self, name):
        path = self._by_name(name)
        loaded = load_config(path)
        written, _ = read_tree(path.read_text(), str(path))
        warned = {line.split(": ")[0].split(" ")[-1] for line in loaded.warnings}
        for section, model in (
            ((), loaded.config),
            (("trl",), loaded.config.trl),
            (("vllm",), loaded.config.vllm),
        ):
            node = written.find(section)
            for key, value in node.entries() if node is not None else ():
                dotted = ".".join((*section, key))
                if dotted in warned or dotted in ("trl", "vllm"):
                    continue
                assert key in type(model).model_fields, dotted
                if isinstance(value.value, str) and key not in ("scale_rewards",):
                    assert _same(getattr(model, key), value.value), dotted
        assert all(":" in line.split(" ")[0] for line in loaded.warnings)

    def test_older_places_are_honoured(self):
        config = load_config(self._by_name("gsm8k_qwen3_8b_issue")).config
        assert (config.vllm.gpu_memory_utilization, config.vllm.max_model_len) == (0.9, 800)

    def test_gdpo_normalises_first(self):
        config = load_config(self._by_name("qlora_1b_gdpo")).config
        assert config.trl.multi_objective_aggregation == "normalize_then_sum"

    def test_a_third_party_plugin_is_one_clear_error(self):
        path = self._by_name("lora_liger")
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        (line,) = caught.value.details
        assert line.startswith(f"{path}:49 plugins: are not supported")
        assert "plugin_atropos.AtroposPlugin" in line


def _same(value, text):
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, (int, float)):
        return float(text) == value
    return str(value) == str(text)


class TestLegacy:
    def test_every_older_name_is_tried_below(self):
        tried = {line for line in Path(__file__).read_text().splitlines() if "lambda config" in line}
        for old in RENAMED:
            assert any(f" {old[-1]}: " in line or f'"{old[-1]}: ' in line for line in tried), old

    def test_both_spellings_are_one_too_many(self, problems):
        text = MINIMAL + "lr_scheduler: cosine\nlr_scheduler_type: linear\n"
        message = "is an older name of lr_scheduler, which is set too; keep one of them"
        assert problems(text) == (f"c.yaml:9 lr_scheduler_type: {message}",)

    def test_an_older_name_without_a_value(self, load):
        loaded = load(MINIMAL + "deepspeed_config_path:\ndeepspeed:\n")
        assert loaded.config.deepspeed is None
        assert loaded.warnings == ("c.yaml:8 deepspeed_config_path: is an older name; today's key is deepspeed",)

    def test_beta_moves_into_a_section_that_is_not_there(self, config_file):
        text = "base_model: m\nrl: grpo\nrl_beta: 0.04\n"
        assert load_config(config_file(text), purpose="vllm-serve").config.trl.beta == 0.04

    def test_keys_without_meaning_here(self, load):
        loaded = load(MINIMAL + "sample_packing: false\ngc_steps: 1\nvllm: {enable_reasoning: true}\n")
        assert loaded.warnings == (
            "c.yaml:8 sample_packing: has no effect here",
            "c.yaml:9 gc_steps: has no effect here",
            "c.yaml:10 vllm.enable_reasoning: has no effect here",
        )

    @pytest.mark.parametrize(
        ("line", "read"),
        [
            ("lr_scheduler_type: linear", lambda config: config.lr_scheduler == "linear"),
            ("rl_beta: 0.04", lambda config: config.trl.beta == 0.04),
            ("revision: 1.10", lambda config: config.revision_of_model == "1.10"),
            ("deepspeed_config_path: z.json", lambda config: config.deepspeed == "z.json"),
            ("chat_template_jinja: '{{ 1 }}'", lambda config: config.chat_template == "{{ 1 }}"),
            ("noisy_embedding_alpha: 5", lambda config: config.neftune_noise_alpha == 5),
            ("  vllm_gpu_memory_utilization: 0.3", lambda config: config.vllm.gpu_memory_utilization == 0.3),
            ("  vllm_max_model_len: 600", lambda config: config.vllm.max_model_len == 600),
            ("  vllm_max_model_length: 600", lambda config: config.vllm.max_model_len == 600),
            ("  vllm_tensor_parallel_size: 2", lambda config: config.vllm.tensor_parallel_size == 2),
            ("  vllm_dtype: float16", lambda config: config.vllm.dtype == "float16"),
            ("  vllm_device: cpu", lambda config: config.vllm.device == "cpu"),
            ("  vllm_structured_outputs_regex: a+", lambda config: config.trl.vllm_guided_decoding_regex == "a+"),
            ("  max_prompt_length: 99", lambda config: config.sequence_len == 99),
        ],
    )
    def test_an_older_name_counts_and_is_named_once(self, load, line, read):
        loaded = load(MINIMAL + line + "\n")
        assert read(loaded.config)
        (warning,) = loaded.warnings
        assert warning.startswith("c.yaml:8 ")
        assert line.split(":")[0].strip() in warning

    def test_keys_of_plugins(self, problems):
        text = MINIMAL + "liger_rope: true\ncut_cross_entropy: true\n"
        assert problems(text) == (
            "c.yaml:8 liger_rope: belongs to the plugin axolotl.integrations.liger, and plugins are not supported",
            "c.yaml:9 cut_cross_entropy: belongs to the plugin axolotl.integrations.cut_cross_entropy, and plugins are "
            "not supported",
        )

    def test_both_names_of_the_importance_cap(self, load, problems):
        capped = load(MINIMAL + "  vllm_importance_sampling_cap: 2.0\n")
        assert capped.config.trl.vllm_importance_sampling_clip_max == 2.0
        assert capped.warnings == ()
        both = "  vllm_importance_sampling_cap: 2.0\n  vllm_importance_sampling_clip_max: 5.0\n"
        (line,) = problems(MINIMAL + both)
        assert line.startswith("c.yaml:8 trl.vllm_importance_sampling_cap: is 2.0, but")


class TestNotNeeded:
    def test_a_worker_extension_is_said_to_be_superfluous_once(self, load):
        loaded = load(MINIMAL + "vllm: {worker_extension_cls: a.B}\n")
        message = "is not needed: this server takes adapters without an extension"
        assert loaded.warnings == (f"c.yaml:8 vllm.worker_extension_cls: {message}",)
        assert load(dump_config(loaded.config)).warnings == ()


class TestDump:
    def test_the_dump_loads_to_the_same_config_without_warnings(self, load, config_file):
        text = MINIMAL + (
            "  generation_kwargs: {a: 1e-4, b: '1e-4', c: null, d: 'true', e: [1, '2']}\n"
            "  vllm_importance_sampling_cap: 2.0\n"
            "special_tokens: {pad_token: '<|x|>'}\nwandb_name: 'None'\nwandb_entity: 'yes'\nrevision_of_model: 1.10\n"
            "gc_steps: 1\noptimizer: sgd\noptim_args: {a: 1}\nsave_steps: 0.5\n"
        )
        first = load(text).config
        second = load(dump_config(first))
        assert second.config == first
        assert second.warnings == ()

    def test_a_server_elsewhere(self, load):
        first = load(MINIMAL + "  vllm_server_host: 10.0.0.5\n  vllm_server_port: 9000\n").config
        assert load(dump_config(first)).config == first

    @given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=12))
    @settings(max_examples=20, deadline=None)
    def test_any_text_survives(self, text):
        config = config_from_mapping(
            {
                "base_model": "m",
                "rl": "grpo",
                "micro_batch_size": 8,
                "datasets": [{"path": "a"}],
                "trl": {"reward_funcs": ["r.f"], "generation_kwargs": {"stop": text}},
                "wandb_name": text,
            }
        )
        root, _ = read_tree(dump_config(config), "dump")
        assert read_text(root.find(("wandb_name",)).value) == text
        assert read_free(root.find(("trl", "generation_kwargs", "stop")).value) == text


def test_a_config_built_in_code_is_held_to_the_same_rules():
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({"base_model": "m", "rl": "grpo", "trl": {"temperature": 0, "betta": 1}})
    assert "config trl.betta: unknown key. Did you mean beta?" in caught.value.details


@pytest.mark.parametrize("purpose", ["train", "vllm-serve"])
@pytest.mark.parametrize("key", ["base_model", "tokenizer_config"])
def test_a_model_beside_the_config_is_found_from_anywhere(tmp_path, monkeypatch, purpose, key):
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    (job / "model").mkdir(parents=True)
    elsewhere.mkdir()
    text = MINIMAL.replace("some/model", "model") if key == "base_model" else MINIMAL + "tokenizer_config: model\n"
    (job / "c.yaml").write_text(text)
    monkeypatch.chdir(elsewhere)
    assert getattr(load_config("../job/c.yaml", purpose=purpose).config, key) == str(job / "model")
    # What is in the working directory comes first, and stays as it was written.
    (elsewhere / "model").mkdir()
    assert getattr(load_config("../job/c.yaml", purpose=purpose).config, key) == "model"


def test_a_home_directory_is_filled_in_and_a_hub_name_is_left_alone(load, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load(MINIMAL.replace("some/model", "~/models/a")).config.base_model == "/home/me/models/a"
    assert load(MINIMAL).config.base_model == "some/model"
