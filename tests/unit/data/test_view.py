from __future__ import annotations

import pickle

import pytest

from axolotl.data.view import ConfigView
from axolotl.utils.schemas.config import AxolotlConfig


@pytest.fixture
def view() -> ConfigView:
    return ConfigView(
        AxolotlConfig(
            base_model="m",
            rl="grpo",
            sequence_len=99,
            datasets=[{"path": "d", "name": "main"}],
            trl={"num_generations": 4, "chat_template_kwargs": {"enable_thinking": False}},
        )
    )


def test_attributes_items_and_get_agree(view: ConfigView) -> None:
    assert view.sequence_len == view["sequence_len"] == view.get("sequence_len") == 99
    assert view.get("no_such_option") is None and view.get("no_such_option", 5) == 5
    assert "rl" in view and "no_such_option" not in view


def test_sections_lists_and_mappings_are_views_too(view: ConfigView) -> None:
    assert view.trl.num_generations == view["trl"]["num_generations"] == view.trl.get("num_generations") == 4
    assert view.datasets[0].name == "main" and view["datasets"][0]["path"] == "d"
    assert view.trl.chat_template_kwargs.enable_thinking is False
    assert dict(view.trl.chat_template_kwargs) == {"enable_thinking": False}


def test_nothing_can_be_written(view: ConfigView) -> None:
    with pytest.raises(AttributeError, match="read-only"):
        view.sequence_len = 1
    with pytest.raises(TypeError):
        view["sequence_len"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        view.datasets.append(1)
    assert view.sequence_len == 99


def test_an_unknown_option_is_an_error_with_a_suggestion(view: ConfigView) -> None:
    with pytest.raises(AttributeError, match="no 'sequence_length'; did you mean 'sequence_len'"):
        view.sequence_length  # noqa: B018
    with pytest.raises(KeyError):
        view["sequence_length"]


def test_it_travels_to_other_processes(view: ConfigView) -> None:
    assert pickle.loads(pickle.dumps(view)).trl.num_generations == 4
