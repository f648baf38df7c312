"""Models and schedules that cannot be used: one error that names the option, no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from axolotl.cli.main import main
from axolotl.errors import ConfigError
from axolotl.loaders.model import load_model
from axolotl.loaders.precision import resolve_precision
from axolotl.utils.schemas.config import AxolotlConfig
from tests.support.project import make_project
from tests.support.tiny_model import make_tiny_tokenizer


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_project(tmp_path, tiny_model)
    return tmp_path


def config_of(model: Path) -> AxolotlConfig:
    return AxolotlConfig.model_validate(
        {
            "base_model": str(model),
            "rl": "grpo",
            "micro_batch_size": 4,
            "datasets": [{"path": "rows.jsonl"}],
            "trl": {"reward_funcs": ["rewards.one"], "num_generations": 4},
        }
    )


def load(model: Path) -> None:
    config = config_of(model)
    load_model(config, make_tiny_tokenizer(), resolve_precision(config, "cpu"), "cpu")


def broken(tiny_model: Path, directory: Path, **changes: Any) -> Path:
    shutil.copytree(tiny_model, directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


@pytest.mark.parametrize(
    "changes",
    [{"num_attention_heads": "many"}, {"num_attention_heads": 0}, {"intermediate_size": 100}, {"vocab_size": None}],
    ids=str,
)
def test_a_config_that_does_not_fit_its_model(changes: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"base_model: .* cannot be loaded") as caught:
        load(broken(tiny_model, tmp_path / "model", **changes))
    assert caught.value.code == "E-CFG-11" and caught.value.why


@pytest.mark.parametrize("content", ["[1]", "null", '"text"', "{", ""])
def test_a_config_that_is_no_mapping(content: str, tiny_model: Path, tmp_path: Path) -> None:
    (broken(tiny_model, tmp_path / "model") / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"base_model: .* cannot be loaded"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        OSError(28, "No space left on device"),
    ],
    ids=repr,
)
def test_a_machine_that_is_full_is_not_blamed_on_the_model(
    error: Exception, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(type(error)) as caught:
        load(tiny_model)
    assert caught.value is error


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--lr_scheduler", "warmup_stable_decay"], ["E-CFG-12", "num_decay_steps"]),
        (["--lr_scheduler", "cosine_with_min_lr"], ["E-CFG-12", "min_lr"]),
        (["--lr_scheduler_kwargs", "{power: 2}"], ["E-CFG-12", "takes no power"]),
        # The longest of the questions and a completion do not fit into the model's 512 positions.
        (["--trl.max_completion_length", "510"], ["E-CFG-14", "max_position_embeddings of base_model is 512"]),
    ],
    ids=lambda value: value[-1],
)
def test_what_would_fail_once_training_has_begun(
    options: list[str], wanted: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = main(["train", "config.yaml", *options]), capsys.readouterr().err
    assert code == 2 and all(text in error for text in wanted) and "Traceback" not in error, error


def test_resume_and_overwrite_together_leave_a_directory_alone(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "out").mkdir()
    (project / "out" / "thesis.tex").write_text("mine")
    assert main(["train", "config.yaml", "--resume", "--overwrite"]) == 2
    assert "contradict" in capsys.readouterr().err
    assert [item.name for item in (project / "out").iterdir()] == ["thesis.tex"]
