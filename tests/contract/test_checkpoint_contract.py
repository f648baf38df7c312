"""What our checkpoints rely on: where transformers writes one, when it uploads and rotates, what it takes back."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import Trainer, TrainerState
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


def test_it_writes_where_it_is_told_and_nowhere_else() -> None:
    """`_get_output_dir` is what we answer with a temporary directory while it saves."""
    source = inspect.getsource(Trainer._save_checkpoint)
    assert source.count("self._get_output_dir(") == 1 and "self.args.output_dir" not in source
    assert "PREFIX_CHECKPOINT_DIR}-{self.state.global_step}" in source


def test_it_uploads_and_rotates_last() -> None:
    """Uploads wait for the checkpoint's name, and rotation finds no limit."""
    source = inspect.getsource(Trainer._save_checkpoint)
    assert source.index("save_to_json") < source.index("_push_from_checkpoint") < source.index("rotate_checkpoints")
    assert "save_total_limit=self.args.save_total_limit" in source


def test_a_resumed_run_begins_with_the_intervals_and_rates_of_its_checkpoint() -> None:
    """Which is why `FollowConfig` sets them again."""
    assert "compute_steps" not in inspect.getsource(TrainerState.init_training_references)
    source = inspect.getsource(Trainer._init_training_state)
    assert source.index("compute_steps") < source.index("load_from_json")
    weight = torch.zeros(1, requires_grad=True)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([weight], lr=rate), lambda step: 1.0) for rate in (1.0, 0.5)
    ]
    schedules[0].load_state_dict(schedules[1].state_dict())
    assert schedules[0].base_lrs == [0.5]


def test_state_is_loaded_without_running_code() -> None:
    for method in (Trainer._load_rng_state, Trainer._load_optimizer_and_scheduler):
        source = inspect.getsource(method)
        assert source.count("torch.load(") == source.count("weights_only=True")
