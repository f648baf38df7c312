from __future__ import annotations

import json
import shutil
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


SHARDS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}


def make_sharded(directory: Path, *shards: str) -> str:
    """A model of two shards, of which those named are here, and a file that belongs to no model."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors.index.json").write_text(json.dumps(SHARDS))
    for name in shards:
        (directory / name).write_bytes(name.encode())
    return str(directory)


def test_the_index_says_which_files_are_the_weights(tmp_path: Path) -> None:
    both = ("model-1.safetensors", "model-2.safetensors")
    models = [
        make_sharded(tmp_path / "a", *both),
        make_sharded(tmp_path / "b", *both, "consolidated.safetensors"),
        make_sharded(tmp_path / "c", both[0]),
    ]
    whole, more, part = (fingerprint(model, None, False, ABC).weights for model in models)
    assert whole == more != "" and part == ""


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = make_model(tmp_path / "models" / "m")
    assert fingerprint("~/models/m", None, False, ABC) == fingerprint(model, None, False, ABC)


class Hub:
    """A cache of the model hub with one repository, as a download leaves it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repository = root / "models--org--model"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def add(self, commit: str, weights: bytes | None) -> None:
        """Make it what `main` is."""
        snapshot = self.repository / "snapshots" / commit
        make_model(snapshot, weights=weights or b"")
        if weights is None:
            (snapshot / "model.safetensors").unlink()
        (self.repository / "refs").mkdir(exist_ok=True)
        (self.repository / "refs" / "main").write_text(commit)

    def forget(self) -> None:
        shutil.rmtree(self.repository)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path / "hub", monkeypatch)


OLD, NEW = "a" * 40, "b" * 40


def test_a_hub_model_is_known_by_its_files(tmp_path: Path, hub: Hub) -> None:
    """So a copy of the snapshot in a directory is the same model, and new weights under the name are another."""
    copy = fingerprint(make_model(tmp_path / "copy"), None, False, ABC)
    hub.add(OLD, b"weights")
    old = fingerprint("org/model", None, False, ABC)
    assert (old.base_model, old.weights, old.summary["commit"]) == ("org/model", copy.weights, OLD)
    hub.add(NEW, b"retrained")
    assert differences(old, fingerprint("org/model", None, False, ABC)) == ["weights (the files differ)"]
    assert fingerprint("org/model", OLD, False, ABC) == old


def test_before_its_weights_are_here_a_hub_model_is_known_by_its_commit(hub: Hub) -> None:
    hub.add(OLD, b"weights")
    server = fingerprint("org/model", None, False, ABC)
    hub.forget()
    hub.add(OLD, None)
    assert differences(server, fingerprint("org/model", None, False, ABC)) == []
    hub.add(NEW, None)
    (line,) = differences(server, fingerprint("org/model", None, False, ABC))
    assert line == f"weights (commit {OLD} vs {NEW}; revision_of_model pins one)"
