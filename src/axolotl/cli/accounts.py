"""Accounts elsewhere that a training logs to or uploads to: a missing login is told before anything is loaded."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from axolotl.errors import ConfigError, EnvironmentFault
from axolotl.utils.hub import hub_problem
from axolotl.utils.schemas.config import AxolotlConfig

_WANDB_URL = "https://api.wandb.ai"


def check_accounts(config: AxolotlConfig, reporters: Sequence[str]) -> None:
    """Raise for an account that the run would miss, without asking anybody but the hub whether it is there.

    Args:
        reporters: where metrics go, as resolved from the options about logging.

    Raises:
        EnvironmentFault: nobody is logged in where the config writes to, or the hub cannot be reached.
        ConfigError: what is no name of a repository.
    """
    if "wandb" in reporters:
        _check_wandb(config)
    for option, repository in _repositories(config, reporters):
        _check_hub(option, repository)


def _check_wandb(config: AxolotlConfig) -> None:
    """A key in a wrong place or of a wrong form is for wandb to find; this only knows that there is none."""
    files = _wandb_settings()
    mode = config.wandb_mode or os.environ.get("WANDB_MODE") or files.get("mode", "online")
    has_key = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")) or any(
        files.get(name) for name in ("api_key", "identity_token_file")
    )
    if mode in ("offline", "dryrun", "disabled") or has_key:
        return
    hosts = _wandb_hosts(os.environ.get("WANDB_BASE_URL") or files.get("base_url"))
    if any(_has_password(host) for host in hosts):
        return
    raise EnvironmentFault(
        "metrics go to Weights & Biases, and nobody is logged in there",
        code="E-ENV-11",
        why=f"no WANDB_API_KEY is set, and no netrc file has a key for {hosts[0]}",
        do="run wandb login, or set wandb_mode: offline (or WANDB_MODE=offline), or leave out wandb in the config",
    )


def _wandb_settings() -> dict[str, str]:
    """What `wandb login` and `wandb offline` leave in files: the user's, and over it the one of this directory."""
    directory = Path(os.environ.get("WANDB_DIR") or ".")
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or Path("~/.config/wandb").expanduser())
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([user / "settings", directory / "wandb" / "settings", directory / ".wandb" / "settings"])
    except (OSError, configparser.Error, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _wandb_hosts(own_server: str | None) -> list[str]:
    """Where netrc files may name the server. The default one has had more than one address."""
    if own_server:
        return [urlsplit(own_server).netloc or own_server]
    import wandb

    default: str = wandb.Settings().base_url
    return list(dict.fromkeys([urlsplit(_WANDB_URL).netloc, urlsplit(default).netloc]))


def _has_password(host: str) -> bool:
    named = os.environ.get("NETRC")
    paths = [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]
    for path in paths:
        try:
            entry = netrc.netrc(str(path.expanduser())).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry is not None and entry[2]:
            return True
    return False


def _repositories(config: AxolotlConfig, reporters: Sequence[str]) -> Iterator[tuple[str, str]]:
    if config.hub_model_id is not None:
        yield "hub_model_id", config.hub_model_id
    if "trackio" in reporters:
        if config.trackio_space_id is not None:
            yield "trackio_space_id", config.trackio_space_id
        elif from_environment := os.environ.get("TRACKIO_SPACE_ID"):
            yield "TRACKIO_SPACE_ID", from_environment


def _check_hub(option: str, repository: str) -> None:
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(
            f"{option}: {repository!r} is no name of a repository on the hub",
            why=str(error).splitlines()[0],
            do="write it as owner/name",
        ) from error
    problem = hub_problem() or (None if get_token() else "nobody is logged in: there is no token")
    if problem is not None:
        raise EnvironmentFault(
            f"{option}: {repository} cannot be written to",
            code="E-ENV-12",
            why=problem,
            do=f"run hf auth login (or set HF_TOKEN) where the hub can be reached, or leave out {option}",
        )
