from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from axolotl.errors import AxolotlError, ConfigError, DataError
from axolotl.loaders.tokenizer import load_tokenizer, tokenizer_notes
from axolotl.utils.schemas.config import AxolotlConfig
from tests.support.tiny_model import CHAT_TEMPLATE, END, PAD, VOCAB_SIZE, make_tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(directory)
    return directory


def config(base_model: Path | str, **options: Any) -> AxolotlConfig:
    return AxolotlConfig(base_model=str(base_model), rl="grpo", **options)


def load(base_model: Path | str, **options: Any) -> PreTrainedTokenizerBase:
    return load_tokenizer(config(base_model, **options), Path())


def test_pads_on_the_left_and_keeps_its_own_template(saved: Path) -> None:
    tokenizer = load(saved)
    assert tokenizer.padding_side == "left"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer(["1", "1 1 1"], padding=True)["attention_mask"][0][0] == 0


def test_a_template_of_the_config_replaces_it(saved: Path) -> None:
    assert "start_header_id" in load(saved, chat_template="llama3").chat_template


def test_tokenizer_config_goes_before_base_model(saved: Path) -> None:
    assert len(load("not/there", tokenizer_config=str(saved))) == VOCAB_SIZE


def test_an_empty_pad_token_is_not_set_and_what_is_used_is_said(saved: Path) -> None:
    settings = config(saved, special_tokens={"pad_token": ""})
    tokenizer = load_tokenizer(settings, Path())
    assert tokenizer.pad_token == PAD
    assert tokenizer_notes(settings, tokenizer) == (f"special_tokens.pad_token is not set: padding with {PAD!r}",)


def test_tokens_of_the_vocabulary_take_their_role(saved: Path) -> None:
    settings = config(saved, special_tokens={"pad_token": END, "eos_token": PAD}, trl={"vllm_lora_sync": True})
    tokenizer = load_tokenizer(settings, Path())
    assert (tokenizer.pad_token, tokenizer.eos_token, len(tokenizer)) == (END, PAD, VOCAB_SIZE)
    assert tokenizer_notes(settings, tokenizer) == ()


def test_new_tokens_are_added_to_the_vocabulary(saved: Path) -> None:
    tokenizer = load(saved, special_tokens={"pad_token": "<pad>", "additional_special_tokens": ["<a>", PAD]})
    assert tokenizer.pad_token_id == VOCAB_SIZE and len(tokenizer) == VOCAB_SIZE + 2
    assert tokenizer("<a>")["input_ids"] == [VOCAB_SIZE + 1]


def test_new_tokens_cannot_reach_a_server_through_an_adapter(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"special_tokens: '<pad>' would be new .* trl\.vllm_lora_sync"):
        load(saved, special_tokens={"pad_token": "<pad>"}, trl={"vllm_lora_sync": True})


def without(name: str, directory: Path) -> Path:
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = None
    if name == "end":
        tokenizer.eos_token = None
    tokenizer.save_pretrained(directory)
    return directory


def test_the_end_token_pads_where_there_is_no_pad_token(tmp_path: Path) -> None:
    assert load(without("pad", tmp_path)).pad_token == END


def test_a_tokenizer_with_neither_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"special_tokens\.pad_token: .* neither a pad token nor an end token"):
        load(without("end", tmp_path))


def nowhere(tmp_path: Path) -> str:
    return str(tmp_path / "nowhere")


def empty(tmp_path: Path) -> str:
    return str(tmp_path)


def on_the_hub(tmp_path: Path) -> str:
    return "some-org/some-model"


@pytest.mark.parametrize(
    ("source", "kind", "code", "what"),
    [
        (nowhere, ConfigError, "E-CFG-11", "base_model: there is no directory"),
        (empty, ConfigError, "E-CFG-11", "holds no tokenizer"),
        (on_the_hub, DataError, "E-DAT-05", "base_model: some-org/some-model is not on this machine"),
    ],
)
def test_a_model_that_cannot_be_had_names_the_option(
    tmp_path: Path, source: Callable[[Path], str], kind: type[AxolotlError], code: str, what: str
) -> None:
    with pytest.raises(kind) as caught:
        load(source(tmp_path))
    assert caught.value.code == code
    assert what in caught.value.what and caught.value.why and caught.value.do


def test_tokenizer_files_of_another_shape(tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no tokenizer that can be loaded"):
        load(tmp_path)
