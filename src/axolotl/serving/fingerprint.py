"""What makes a trainer's model and a server's model the same: config, vocabulary, weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from axolotl.errors import EnvironmentFault
from axolotl.serving.wire import Fingerprint

_VOLATILE_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "quantization_config"}
)
_SUMMARY_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_COMMIT = "commit"
_EDGE_BYTES = 65_536


class HasVocab(Protocol):
    """The one method of a tokenizer that the fingerprint needs."""

    def get_vocab(self) -> dict[str, int]: ...


def fingerprint(
    model: str, revision: str | None, trust_remote_code: bool, tokenizer: HasVocab | None = None
) -> Fingerprint:
    """The fingerprint of a model directory or hub name.

    Weights that are not here yet have no digest; of a hub model the summary then still names the `commit`.

    Args:
        tokenizer: the one in use; None loads the model's own. Only which id means which token counts, since ids are
            all that crosses the wire.
    """
    config_path = _config_path(model, revision)
    config = _read_config(config_path)
    directory = config_path.parent
    is_local = directory == Path(model).expanduser()
    if tokenizer is None:
        from transformers import AutoTokenizer

        source = directory if is_local else model
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    assert tokenizer is not None
    vocab = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return Fingerprint(
        base_model=directory.name if is_local else model,
        config=_digest_json(_stable(config)),
        tokenizer=_digest_json(vocab),
        weights=_digest_weights(directory),
        summary={key: config[key] for key in _SUMMARY_KEYS if key in config} | _commit(directory),
    )


def differences(server: Fingerprint, trainer: Fingerprint) -> list[str]:
    """What differs, one readable line a part, server's value first. Weights count only where both sides know them, by
    their files or else by their commit on the hub."""
    lines = []
    if server.config != trainer.config:
        keys = sorted(server.summary.keys() | trainer.summary.keys())
        unequal = [
            f"{key} {server.summary.get(key)} vs {trainer.summary.get(key)}"
            for key in keys
            if server.summary.get(key) != trainer.summary.get(key)
        ]
        lines.append(f"config ({', '.join(unequal) or 'in keys other than the sizes'})")
    if server.tokenizer != trainer.tokenizer:
        lines.append("tokenizer (the same id means different tokens)")
    commits = (server.summary.get(_COMMIT), trainer.summary.get(_COMMIT))
    if server.weights and trainer.weights:
        if server.weights != trainer.weights:
            lines.append("weights (the files differ)")
    elif None not in commits and commits[0] != commits[1]:
        lines.append(f"weights (commit {commits[0]} vs {commits[1]}; revision_of_model pins one)")
    return lines


def read_model_config(model: str, revision: str | None) -> dict[str, Any]:
    """`config.json` as written, so that the versions of transformers on both sides do not matter.

    Raises:
        EnvironmentFault: `E-ENV-06` neither a directory with one, nor a hub model that can be had.
    """
    return _read_config(_config_path(model, revision))


def _config_path(model: str, revision: str | None) -> Path:
    """In the model's directory, or in the cached snapshot of the hub model, where its weights will be too."""
    path = Path(model).expanduser() / "config.json"
    return path if path.is_file() else _from_hub(model, revision)


def _read_config(path: Path) -> dict[str, Any]:
    config = json.loads(path.read_text())
    assert isinstance(config, dict)
    return config


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise EnvironmentFault(
            f"cannot find the model {model}",
            code="E-ENV-06",
            why="it is no directory with a config.json, and the model hub does not have it or cannot be reached",
            do="set base_model to a local directory or to a hub name that can be downloaded here",
        ) from error


def _stable(value: Any) -> Any:
    """Without the keys, at any depth, that do not change what the model computes."""
    if isinstance(value, Mapping):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE_KEYS}
    if isinstance(value, list):
        return [_stable(item) for item in value]
    return value


def _digest_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _digest_weights(directory: Path) -> str:
    """Over names, sizes and the first and last 64 KiB of each weight file; empty unless all of them are here."""
    files = _weight_files(directory)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    return digest.hexdigest() if files else ""


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make the model: those of the index, or the only one. A repository may hold others
    beside them, and a download may have brought only some."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        return files if all(file.is_file() for file in files) else []
    single = directory / "model.safetensors"
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _commit(directory: Path) -> dict[str, str]:
    """The commit of a snapshot in the hub's cache (`.../snapshots/<commit>`), nothing elsewhere."""
    return {_COMMIT: directory.name} if directory.parent.name == "snapshots" else {}
