from __future__ import annotations

import json
from pathlib import Path

import pytest

from axolotl.errors import EnvironmentFault
from axolotl.serving.fingerprint import differences, fingerprint, read_model_config
from axolotl.serving.wire import Fingerprint

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 3,
    "rope_scaling": {"factor": 2.0, "dtype": "bfloat16"},
    "dtype": "float32",
    "transformers_version": "5.0",
    "_name_or_path": "x",
}


class Vocab:
    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}


ABC = Vocab("a", "b", "c")


def make_model(directory: Path, config: dict[str, object] = CONFIG, weights: bytes = b"weights") -> str:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(weights)
    return str(directory)


def test_the_same_model_in_another_place_is_the_same(tmp_path: Path) -> None:
    one = fingerprint(make_model(tmp_path / "one" / "model"), None, False, ABC)
    other = fingerprint(make_model(tmp_path / "other" / "model"), None, False, Vocab("a", "b", "c"))
    assert one == other and differences(one, other) == []
    assert one.summary == {"model_type": "llama", "hidden_size": 64, "vocab_size": 3}


@pytest.mark.parametrize("key", ["dtype", "transformers_version", "_name_or_path"])
def test_keys_that_change_nothing_do_not_count(tmp_path: Path, key: str) -> None:
    one = fingerprint(make_model(tmp_path / "one"), None, False, ABC)
    other = fingerprint(make_model(tmp_path / "other", {**CONFIG, key: "changed"}), None, False, ABC)
    assert one.config == other.config


def test_what_differs_is_named_with_both_values(tmp_path: Path) -> None:
    server = fingerprint(make_model(tmp_path / "server"), None, False, ABC)
    changed = {**CONFIG, "hidden_size": 128}
    trainer = fingerprint(make_model(tmp_path / "trainer", changed, b"other"), None, False, Vocab("a", "c", "b"))
    config, tokenizer, weights = differences(server, trainer)
    assert config == "config (hidden_size 64 vs 128)"
    assert "tokenizer" in tokenizer and "weights" in weights


def test_a_nested_difference_counts(tmp_path: Path) -> None:
    server = fingerprint(make_model(tmp_path / "server"), None, False, ABC)
    changed = {**CONFIG, "rope_scaling": {"factor": 4.0}}
    trainer = fingerprint(make_model(tmp_path / "trainer", changed), None, False, ABC)
    assert differences(server, trainer) == ["config (in keys other than the sizes)"]


def test_weights_are_read_at_both_ends(tmp_path: Path) -> None:
    big = bytes(200_000)
    digests = {
        fingerprint(make_model(tmp_path / name, weights=weights), None, False, ABC).weights
        for name, weights in {"a": big, "b": b"1" + big[1:], "c": big[:-1] + b"1", "d": big + b"0"}.items()
    }
    assert len(digests) == 4


def test_unknown_weights_are_not_compared() -> None:
    one = Fingerprint(base_model="m", config="c", tokenizer="t", weights="", summary={})
    assert differences(one, one.model_copy(update={"weights": "w"})) == []


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot find the model") as problem:
        read_model_config(str(tmp_path / "nothing"), None)
    assert problem.value.code == "E-ENV-06"
