"""What `axolotl.core.run.emergency` relies on when it saves outside of transformers' own moments."""

from __future__ import annotations

import inspect

import pytest
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

pytestmark = pytest.mark.contract


def test_a_checkpoint_is_saved_by_one_method_and_then_told_to_the_callbacks() -> None:
    assert list(inspect.signature(Trainer._save_checkpoint).parameters) == ["self", "model", "trial"]
    assert list(inspect.signature(CallbackHandler.on_save).parameters)[:4] == ["self", "args", "state", "control"]
    source = inspect.getsource(Trainer._maybe_log_save_evaluate)
    assert source.index("self._save_checkpoint(") < source.index("self.callback_handler.on_save(")


def test_that_method_writes_what_resuming_needs() -> None:
    source = inspect.getsource(Trainer._save_checkpoint)
    for part in ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state", "save_to_json"):
        assert part in source
