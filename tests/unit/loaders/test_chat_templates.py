from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from axolotl.errors import ConfigError
from axolotl.loaders.chat_templates import resolve_template, shipped_names
from tests.support.tiny_model import make_tiny_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1? "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
]
QUESTION = [{"role": "user", "content": "1+1?"}]


def render(name: str, messages: list[dict[str, Any]], *, bos: str | None = "<s>", **variables: Any) -> str:
    tokenizer = make_tiny_tokenizer()
    tokenizer.bos_token = bos
    tokenizer.eos_token = "</s>"
    tokenizer.chat_template = resolve_template(name, Path())
    variables = {"add_generation_prompt": True, **variables}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))


CHATML_TURNS = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1? <|im_end|>\n"
    "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
)

EXPECTED = {
    "chatml": CHATML_TURNS,
    "qwen_25": CHATML_TURNS,
    "qwen3": CHATML_TURNS,
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "mistral_v2v3": "<s>[INST] Be brief.\n\n1+1? [/INST] 2</s>[INST] 2+2?[/INST]",
    "phi_3": "<|system|>\nBe brief.<|end|>\n<|user|>\n1+1? <|end|>\n<|assistant|>\n2<|end|>\n<|user|>\n2+2?<|end|>\n"
    "<|assistant|>\n",
}


def test_every_shipped_template_has_an_expectation() -> None:
    assert set(EXPECTED) == set(shipped_names())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_conversation_is_written_as_the_model_family_expects(name: str) -> None:
    assert render(name, TURNS) == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_without_the_opening_of_an_answer_only_the_end_differs(name: str) -> None:
    opened = render(name, TURNS)
    assert opened.startswith(render(name, TURNS, add_generation_prompt=False))


def test_qwen_25_has_a_system_turn_of_its_own() -> None:
    assert render("qwen_25", QUESTION) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen3_can_skip_thinking_and_forgets_earlier_thoughts() -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"}, *QUESTION]
    assert render("qwen3", messages, enable_thinking=False) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_tokenizer_without_a_start_token_gets_none() -> None:
    assert render("llama3", QUESTION, bos=None).startswith("<|start_header_id|>user")


def test_system_only_prompts_are_written() -> None:
    system = [{"role": "system", "content": "Tell a joke."}]
    assert render("gemma", system) == "<s><start_of_turn>user\nTell a joke.<end_of_turn>\n<start_of_turn>model\n"
    assert render("mistral_v2v3", system) == "<s>[INST] Tell a joke.[/INST]"


@pytest.mark.parametrize("setting", [None, "tokenizer_default"])
def test_the_tokenizers_own_is_the_default(setting: str | None) -> None:
    assert resolve_template(setting, Path()) is None


def test_jinja_text_is_taken_as_it_is() -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert resolve_template(text, Path()) == text


def test_a_file_is_found_in_the_working_directory_then_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_dir, here = tmp_path / "conf", tmp_path / "here"
    config_dir.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (config_dir / "mine.jinja").write_text("beside {{ x }}\n")
    assert resolve_template("mine.jinja", config_dir) == "beside {{ x }}\n"
    (here / "mine.jinja").write_text("here {{ x }}\n")
    assert resolve_template("mine.jinja", config_dir) == "here {{ x }}\n"


def test_anything_else_is_an_error_that_lists_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_template("chat_ml", tmp_path)
    assert "chat_template: 'chat_ml'" in caught.value.what and "Did you mean chatml?" in caught.value.what
    assert "llama3" in caught.value.why and str(tmp_path / "chat_ml") in caught.value.why


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        resolve_template("t.jinja", tmp_path)
