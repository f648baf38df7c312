"""Paths that no file system can mean are errors of the config, with the option's name."""

from __future__ import annotations

import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.errors import ConfigError

MINIMAL = {
    "base_model": "m",
    "rl": "grpo",
    "adapter": "lora",
    "trl": {"reward_funcs": ["r.f"], "num_generations": 2},
    "datasets": [{"path": "d.json"}],
    "micro_batch_size": 2,
}


@pytest.mark.parametrize(
    ("key", "extra"),
    [
        (name, lambda value, name=name: {name: value})
        for name in ("base_model", "tokenizer_config", "output_dir", "dataset_prepared_path", "chat_template")
    ]
    + [
        ("deepspeed", lambda value: {"deepspeed": value}),
        ("vllm.sync_dir", lambda value: {"vllm": {"sync_dir": value}}),
        ("datasets.0.path", lambda value: {"datasets": [{"path": value}]}),
        ("datasets.0.data_files", lambda value: {"datasets": [{"path": "json", "data_files": [value]}]}),
    ],
)
@pytest.mark.parametrize("value", ["~no_such_user_here/x", "a" * 300, "a\0b"], ids=["no user", "too long", "NUL"])
def test_a_path_that_cannot_exist_names_its_option(key, extra, value):
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({**MINIMAL, **extra(value)})
    assert any(key in line for line in caught.value.details), caught.value.details


def test_ordinary_paths_and_template_text_pass():
    text = "{% for message in messages %}" + "x" * 300 + "{% endfor %}"
    config = config_from_mapping({**MINIMAL, "output_dir": "~/runs/ä", "chat_template": text})
    assert config.chat_template == text
