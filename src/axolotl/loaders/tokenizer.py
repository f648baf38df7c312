"""The tokenizer as the config wants it: template, special tokens, padding on the left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from axolotl.errors import ConfigError, DataError
from axolotl.loaders.chat_templates import resolve_template
from axolotl.utils.hub import hub_problem, looks_like_path
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.user_code import pass_interruption


def load_tokenizer(config: AxolotlConfig, base_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `tokenizer_config`, or of `base_model`, with everything set that the config asks for.

    New tokens of `special_tokens` are in it: where `len(tokenizer)` exceeds the embeddings, the caller resizes them.
    Raises `ConfigError` for a path or a combination that cannot work, `DataError` E-DAT-05 when the hub is needed and
    cannot be reached.
    """
    tokenizer = _from_pretrained(config)
    template = resolve_template(config.chat_template, base_dir)
    if template is not None:
        tokenizer.chat_template = template
    _set_special_tokens(tokenizer, config)
    if tokenizer.pad_token is None:
        _pad_with_end_token(tokenizer)
    tokenizer.padding_side = "left"
    return tokenizer


def tokenizer_notes(config: AxolotlConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Lines for the start of a run: what was chosen where the config left it open."""
    wanted = dict(config.special_tokens or {}).get("pad_token")
    if wanted:
        return ()
    return (f"special_tokens.pad_token is not set: padding with {tokenizer.pad_token!r}",)


def _from_pretrained(config: AxolotlConfig) -> PreTrainedTokenizerBase:
    key = "tokenizer_config" if config.tokenizer_config else "base_model"
    source = config.tokenizer_config or config.base_model
    local = Path(source).expanduser()
    if looks_like_path(source) and not local.is_dir():
        raise ConfigError(
            f"{key}: there is no directory {source}",
            code="E-CFG-11",
            why=f"looked for {local.absolute()}",
            do=f"set {key} to a model directory or a hub name such as Qwen/Qwen2.5-1.5B-Instruct",
        )
    arguments: dict[str, Any] = {"trust_remote_code": bool(config.trust_remote_code)}
    if local.is_dir():
        return _load_directory(local, key, arguments)
    if config.revision_of_model:
        arguments["revision"] = config.revision_of_model
    return _load_from_hub(source, key, arguments)


def _load_directory(directory: Path, key: str, arguments: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(str(directory), **arguments)
    except Exception as error:
        # The libraries read the files as they are: a list where they expect a mapping is an AttributeError there.
        pass_interruption(error)
        raise ConfigError(
            f"{key}: {directory} holds no tokenizer that can be loaded",
            code="E-CFG-11",
            why=_short(error),
            do="save the tokenizer there (tokenizer.json, tokenizer_config.json), or set tokenizer_config",
        ) from error


def _load_from_hub(name: str, key: str, arguments: dict[str, Any]) -> PreTrainedTokenizerBase:
    """From the local cache when it is there, without asking the hub; otherwise from the hub."""
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, **arguments)
    except (OSError, ValueError, KeyError):
        problem = hub_problem()
    if problem is not None:
        raise DataError(
            f"{key}: {name} is not on this machine and the model hub cannot be asked",
            code="E-DAT-05",
            why=problem,
            do=f"set {key} to a local model directory, or download the model where there is a network",
        )
    try:
        return AutoTokenizer.from_pretrained(name, **arguments)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{key}: no tokenizer could be loaded from {name} on the hub",
            code="E-CFG-11",
            why=_short(error),
            do="check the name; a private or gated model needs `hf auth login` or HF_TOKEN",
        ) from error


def _set_special_tokens(tokenizer: PreTrainedTokenizerBase, config: AxolotlConfig) -> None:
    """Sets the tokens of `special_tokens`; an empty text counts as not set."""
    wanted = {name: token for name, token in dict(config.special_tokens or {}).items() if token}
    known = tokenizer.get_vocab()
    new = [token for value in wanted.values() for token in _as_list(value) if token not in known]
    if new and config.trl.vllm_lora_sync:
        raise ConfigError(
            f"special_tokens: {', '.join(map(repr, new))} would be new to the vocabulary, which trl.vllm_lora_sync "
            "cannot bring to the server",
            why="an adapter carries no embeddings, so the server would not know the token",
            do="use a token that the tokenizer already has, or leave it out",
        )
    if wanted:
        tokenizer.add_special_tokens(wanted)


def _pad_with_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token is None:
        raise ConfigError(
            "special_tokens.pad_token: the tokenizer has neither a pad token nor an end token to use instead",
            do="set special_tokens.pad_token, and special_tokens.eos_token so that completions can end",
        )
    tokenizer.pad_token = tokenizer.eos_token


def _as_list(value: Any) -> list[str]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
