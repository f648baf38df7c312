"""The traps of YAML that people fell into, one row each."""

import pytest

from tests.unit.cli.conftest import MINIMAL


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1E-4", "0.0001", "1.e-4", "+1e-4"])
def test_a_learning_rate_in_any_notation_is_a_number(load, text):
    assert load(MINIMAL + f"learning_rate: {text}\n").config.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("text", "value"), [("1_000", 1000), ("1000", 1000), ("1e3", 1000), ("+7", 7), ("1000.0", 1000)]
)
def test_whole_numbers(load, text, value):
    loaded = load(MINIMAL + f"max_steps: {text}\n").config.max_steps
    assert loaded == value
    assert isinstance(loaded, int)


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "ON"])
def test_every_spelling_of_true(load, word):
    assert load(MINIMAL + f"tf32: {word}\nfp16: {word}\n").config.fp16 is True


@pytest.mark.parametrize("word", ["false", "no", "off", "Off"])
def test_every_spelling_of_false(load, word):
    assert load(MINIMAL + f"flash_attention: {word}\n").config.flash_attention is False


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("learning_rate: fast", "c.yaml:8 learning_rate: needs a number, not fast"),
        (
            'learning_rate: "1e-4"',
            'c.yaml:8 learning_rate: needs a number, and "1e-4" is text; write it without quotes',
        ),
        ("learning_rate: .nan", "c.yaml:8 learning_rate: needs a number, and .nan is not finite"),
        ("learning_rate: .inf", "c.yaml:8 learning_rate: needs a number, and .inf is not finite"),
        ("learning_rate: 1e999", "c.yaml:8 learning_rate: needs a number, and 1e999 is not finite"),
        ("learning_rate: true", "c.yaml:8 learning_rate: needs a number, not true"),
        ("seed: [1]", "c.yaml:8 seed: needs a whole number, not [1]"),
        ("seed: 1.5", "c.yaml:8 seed: needs a whole number, not 1.5"),
        ("learning_rate: -1", "c.yaml:8 learning_rate: must be at least 0, not -1"),
        ("lora_dropout: 1", "c.yaml:8 lora_dropout: must be below 1, not 1"),
        ("tf32: maybe", "c.yaml:8 tf32: needs true, false, auto, not maybe"),
        ('fp16: "true"', 'c.yaml:8 fp16: needs true or false, and "true" is text; write it without quotes'),
        ("wandb_name: true", 'c.yaml:8 wandb_name: needs text, and true is a YAML boolean; quote it: "true"'),
        ("wandb_name: [PAD]", 'c.yaml:8 wandb_name: needs text, and [PAD] is a list; quote it: "[PAD]"'),
        ("optimizer: adamw_torch_fuse", "Did you mean adamw_torch_fused?"),
        ("on: 1", "c.yaml:8 on: unknown key"),
        ("gradient_checkpointing_kwargs: 3", "needs a mapping (`key: value` lines), not 3"),
        ("lora_modules_to_save: a", "needs a list: write `- a` on the next line, or [a]"),
        ("datasets2: !!python/name:os.system x", "tag tag:yaml.org,2002:python/name:os.system is not allowed"),
        ("wandb_name: !secret x", "c.yaml:8 wandb_name: tag !secret is not allowed"),
        ("? [a, b]\n: 1", "has a sequence as a key; a key is a word"),
        ("<<: {seed: 1}", "c.yaml:8 <<: merging is not supported; write the keys out"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_line(problems, line, finding):
    found = problems(MINIMAL + line + "\n")
    assert any(finding in entry for entry in found), found


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("port: 017", "vllm.port: needs a whole number, and 017 could be read in several ways; write the plain number"),
        ("port: 1:20", "vllm.port: needs a whole number, and 1:20 could be read in several ways"),
        ("port: 12:30:45", "vllm.port: needs a whole number, and 12:30:45 could be read in several ways"),
        ("port: 0x50", "vllm.port: needs a whole number, not 0x50"),
        ("port: 70000", "vllm.port: must be at most 65535, not 70000"),
    ],
)
def test_ports_that_yaml_1_1_reads_as_another_number(problems, line, finding):
    (found,) = problems(MINIMAL + f"vllm:\n  {line}\n")
    assert found.startswith("c.yaml:9 ")
    assert finding in found


@pytest.mark.parametrize("text", ["1.10", "2024-01-01", "1234567", "1e-4", "on", "017", "null_branch"])
def test_text_fields_keep_the_text_as_written(load, text):
    assert load(MINIMAL + f"revision_of_model: {text}\n").config.revision_of_model == text


@pytest.mark.parametrize("word", ["no", "on"])
def test_a_word_that_is_no_choice_lists_the_choices(problems, word):
    (found,) = problems(MINIMAL + f"  loss_type: {word}\n")
    assert f"must be one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo, not {word}" in found


def test_no_is_a_word_where_no_is_a_choice(load):
    assert load(MINIMAL + "save_strategy: no\n").config.save_strategy == "no"


def test_the_none_of_python_is_not_null(problems):
    (scale,) = problems(MINIMAL + "  scale_rewards: None\n")
    assert "needs true, false, group, batch, none, not None" in scale
    (name,) = problems(MINIMAL + "wandb_name: None\n")
    assert "write null or leave it empty" in name


def test_a_repeated_key_names_both_lines(problems):
    assert problems(MINIMAL + "rl: grpo\n") == ("c.yaml:8 rl: repeats the key of line 2",)
    assert problems(MINIMAL + "  beta: 1\n  beta: 1\n") == ("c.yaml:9 trl.beta: repeats the key of line 8",)


@pytest.mark.parametrize(
    ("text", "place"),
    [("a:\n\tb: 1\n", "tab at line 2 column 1; use spaces"), ("rl:\tgrpo\n", "tab at line 1 column 4")],
)
def test_tabs_are_named_with_line_and_column(problems, text, place):
    (found,) = problems(text)
    assert place in found


@pytest.mark.parametrize("token", ["<|endoftext|>", '"[PAD]"', "'|x|'"])
def test_tokens(load, token):
    loaded = load(MINIMAL + f"special_tokens:\n  pad_token: {token}\n").config
    assert loaded.special_tokens.pad_token == token.strip("\"'")


@pytest.mark.parametrize("token", ["", "#", "!", "&x", "~"])
def test_a_token_that_yaml_loses_is_an_error(problems, token):
    (found,) = problems(MINIMAL + f"special_tokens:\n  pad_token: {token}\n")
    assert found.startswith("c.yaml:9 special_tokens.pad_token: has no value; quote the token")


@pytest.mark.parametrize("token", ["|endoftext|", "`x`", "@x", "%x"])
def test_a_token_that_is_no_yaml_gets_the_hint_to_quote(load, token):
    from axolotl.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        load(MINIMAL + f"special_tokens:\n  pad_token: {token}\n")
    assert caught.value.what.startswith("c.yaml:9: ")
    assert caught.value.do == "quote the value"


def test_a_token_in_brackets_is_a_list(problems):
    (found,) = problems(MINIMAL + "special_tokens:\n  eos_token: [PAD]\n")
    assert 'is a list; quote it: "[PAD]"' in found


def test_the_empty_pad_token_of_the_guide_counts_as_unset(load):
    loaded = load(MINIMAL + 'special_tokens:\n  pad_token: ""\n')
    assert loaded.config.special_tokens.pad_token is None
    assert loaded.warnings == (
        "c.yaml:9 special_tokens.pad_token: is empty, so it counts as unset and the tokenizer's own is used",
    )


def test_a_regular_expression_wants_single_quotes(load):
    from axolotl.errors import ConfigError

    text = MINIMAL + "  vllm_guided_decoding_regex: {}\n"
    assert load(text.format(r"'\d+'")).config.trl.vllm_guided_decoding_regex == r"\d+"
    with pytest.raises(ConfigError) as caught:
        load(text.format(r'"\d+"'))
    assert "single quotes" in caught.value.do


def test_keys_that_slipped_out_of_their_section(problems):
    text = MINIMAL.replace("trl:\n  reward_funcs", "trl:\nreward_funcs") + "max_model_len: 5\n"
    found = problems(text)
    assert "c.yaml:7 reward_funcs: unknown key; it belongs under trl:" in found
    assert "c.yaml:8 max_model_len: unknown key; it belongs under vllm:" in found


def test_free_mappings_follow_yaml_1_2(load):
    text = MINIMAL + "  generation_kwargs: {a: 1e-4, b: 7, c: yes, d: true, e: '7', f: null, g: [1, x]}\n"
    expected = {"a": 1e-4, "b": 7, "c": "yes", "d": True, "e": "7", "f": None, "g": [1, "x"]}
    assert load(text).config.trl.generation_kwargs == expected


def test_free_mappings_hold_finite_numbers(problems):
    (found,) = problems(MINIMAL + "  generation_kwargs: {a: .inf}\n")
    assert ".inf is not finite" in found


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~\n", "null\n"])
def test_an_empty_file(problems, text):
    assert problems(text) == ("c.yaml is empty",)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n"])
def test_a_file_that_is_no_mapping(problems, text):
    assert problems(text) == ("c.yaml must hold `key: value` lines",)


def test_two_documents_are_one_too_many(problems):
    (found,) = problems("a: 1\n---\nb: 2\n")
    assert found.startswith("c.yaml:2: ")


def test_limits_on_size(problems):
    assert "bytes" in problems("# " + "x" * 1_000_000)[0]
    assert "10000 values" in problems("a: [" + "1," * 10_000 + "1]\n")[0]
    assert "100 aliases" in problems("a: &x 1\nb: [" + "*x," * 101 + "1]\n")[0]
    assert "nested" in problems("a: " + "[" * 60 + "]" * 60 + "\n")[0]
    assert "nested" in problems("a: " + "[" * 5000 + "]" * 5000 + "\n")[0]


def test_aliases_that_multiply(problems):
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, 9)]
    assert "once its aliases are expanded" in problems("\n".join(lines))[0]


def test_an_alias_within_itself(problems):
    assert "nested" in problems("a: &a [*a]\n")[0]


def test_anchors_work_where_they_are_harmless(load):
    loaded = load(MINIMAL + "seed: &s 7\nmax_steps: *s\n").config
    assert (loaded.seed, loaded.max_steps) == (7, 7)


@pytest.mark.parametrize(("data", "finding"), [(b"a: \xff\n", "not UTF-8"), (b"a: \x00\n", "not valid YAML")])
def test_bytes_that_are_no_text(load, problems, config_file, data, finding):
    from axolotl.cli.config import load_config
    from axolotl.errors import ConfigError

    path = config_file("")
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=finding):
        load_config(path)


def test_a_byte_order_mark_and_windows_line_ends(load, config_file):
    from axolotl.cli.config import load_config

    path = config_file("")
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(path).config.base_model == "some/model"
