from collections.abc import Callable
from pathlib import Path

import pytest

from axolotl.cli.config import LoadedConfig, load_config
from axolotl.errors import ConfigError

MINIMAL = """\
base_model: some/model
rl: grpo
micro_batch_size: 8
datasets:
  - path: rows.jsonl
trl:
  reward_funcs: [rewards.accuracy]
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes `c.yaml` into the working directory, so that errors name it `c.yaml`."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("c.yaml").write_text(text)
        return Path("c.yaml")

    return write


@pytest.fixture
def load(config_file: Callable[[str], Path]) -> Callable[..., LoadedConfig]:
    """Loads a config text with overrides."""
    return lambda text, *overrides: load_config(config_file(text), overrides)


@pytest.fixture
def problems(load: Callable[..., LoadedConfig]) -> Callable[..., tuple[str, ...]]:
    """The problem lines of a config that must not load."""

    def find(text: str, *overrides: tuple[str, str]) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert caught.value.exit_code == 2
        return caught.value.details or (caught.value.what,)

    return find
