"""A missing login ends `train` before anything is loaded; nobody is asked over the network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axolotl.cli.accounts import check_accounts
from axolotl.cli.config import LoadedConfig
from axolotl.cli.main import main
from axolotl.core.trainers.grpo.args import reporters
from axolotl.errors import ConfigError, EnvironmentFault
from tests.unit.cli.conftest import MINIMAL

Check = Callable[..., None]


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without logins."""
    for name in ("MODE", "API_KEY", "IDENTITY_TOKEN_FILE", "BASE_URL", "CONFIG_DIR", "DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name in ("NETRC", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr("axolotl.cli.accounts.hub_problem", lambda: None)
    # What the default server is, as wandb would say it.
    settings = SimpleNamespace(base_url="https://api.another.example")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=lambda: settings))


@pytest.fixture
def check(load: Callable[..., LoadedConfig]) -> Check:
    def run(text: str) -> None:
        config = load(MINIMAL + text).config
        check_accounts(config, reporters(config))

    return run


@pytest.mark.parametrize("text", ["report_to: wandb\n", "wandb_project: x\n", "use_wandb: true\n"])
def test_wandb_without_a_login(check: Check, text: str) -> None:
    with pytest.raises(EnvironmentFault) as problem:
        check(text)
    error = problem.value
    assert (error.exit_code, error.code) == (3, "E-ENV-11")
    assert "wandb login" in error.do and "WANDB_MODE=offline" in error.do and "api.wandb.ai" in error.why


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("environment", "files"),
    [
        ({"WANDB_API_KEY": "k"}, {}),
        ({"WANDB_IDENTITY_TOKEN_FILE": "t"}, {}),
        ({"WANDB_MODE": "offline"}, {}),
        ({"WANDB_MODE": "disabled"}, {}),
        ({}, {".netrc": "machine api.wandb.ai login user password k\n"}),
        ({}, {"_netrc": "machine api.another.example login user password k\n"}),
        ({"NETRC": "~/other"}, {"other": "machine api.wandb.ai login user password k\n"}),
        ({"WANDB_BASE_URL": "http://own:8080/"}, {".netrc": "machine own:8080 login user password k\n"}),
        ({}, {".config/wandb/settings": "[default]\nmode = offline\n"}),
        ({}, {"wandb/settings": "[default]\napi_key = k%\n"}),
    ],
)
def test_wandb_with_a_login_or_without_need_of_one(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], files: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        write(tmp_path / name, text)
    check("report_to: wandb\n")


def test_the_option_wins_over_the_environment(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    check("report_to: wandb\nwandb_mode: offline\n")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(EnvironmentFault):
        check("report_to: wandb\nwandb_mode: online\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".netrc", "machine api.other.ai login user password k\n"),
        (".netrc", "machine\n"),
        (".config/wandb/settings", "mode = offline\n"),
        (".config/wandb/settings", "[default]\nmode = online\n"),
    ],
    ids=["another host", "broken netrc", "broken settings", "online"],
)
def test_files_that_are_no_login(check: Check, tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path / name, text)
    with pytest.raises(EnvironmentFault):
        check("report_to: wandb\n")


def test_the_key_of_the_default_server_is_none_for_an_own_one(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / ".netrc", "machine api.wandb.ai login user password k\n")
    monkeypatch.setenv("WANDB_BASE_URL", "https://own.example")
    with pytest.raises(EnvironmentFault) as problem:
        check("report_to: wandb\n")
    assert "own.example" in problem.value.why


HUB = [
    ("hub_model_id: me/x\n", {}, "hub_model_id"),
    ("report_to: trackio\ntrackio_space_id: me/x\n", {}, "trackio_space_id"),
    ("report_to: trackio\n", {"TRACKIO_SPACE_ID": "me/x"}, "TRACKIO_SPACE_ID"),
]


@pytest.mark.parametrize(("text", "environment", "option"), HUB)
@pytest.mark.parametrize(("token", "unreachable"), [(None, None), ("t", "HF_HUB_OFFLINE is set")])
def test_the_hub_without_a_token_or_a_way_there(
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    environment: dict[str, str],
    option: str,
    token: str | None,
    unreachable: str | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    monkeypatch.setattr("axolotl.cli.accounts.hub_problem", lambda: unreachable)
    with pytest.raises(EnvironmentFault) as problem:
        check(text)
    error = problem.value
    assert (error.exit_code, error.code) == (3, "E-ENV-12")
    assert error.what.startswith(f"{option}: me/x") and option in error.do and "hf auth login" in error.do
    assert (unreachable or "no token") in error.why


@pytest.mark.parametrize(("text", "environment", "_"), HUB)
def test_the_hub_with_a_token(
    check: Check, monkeypatch: pytest.MonkeyPatch, text: str, environment: dict[str, str], _: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "t")
    check(text)


@pytest.mark.parametrize("name", ["me/x/y", "me x", "x--y", "./out"])
def test_what_is_no_repository(check: Check, name: str) -> None:
    with pytest.raises(ConfigError, match="hub_model_id"):
        check(f"hub_model_id: {name}\n")


def test_nothing_is_asked_of_who_writes_nowhere(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not(*_: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("axolotl.cli.accounts.hub_problem", must_not)
    monkeypatch.setattr("huggingface_hub.get_token", must_not)
    check("report_to: tensorboard\ntrackio_space_id: me/x\n")


@pytest.mark.parametrize(("text", "code"), [("report_to: wandb\n", "E-ENV-11"), ("hub_model_id: me/x\n", "E-ENV-12")])
def test_train_ends_before_it_begins(
    config_file: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    code: str,
) -> None:
    def must_not(*_: Any) -> None:
        raise AssertionError("train began")

    monkeypatch.setattr("axolotl.cli.train.run", must_not)
    monkeypatch.setattr("axolotl.cli.main.missing_packages", lambda *_: {})
    assert main(["train", str(config_file(MINIMAL + text))]) == 3
    error = capsys.readouterr().err
    assert f"ERROR {code}" in error and "Traceback" not in error
