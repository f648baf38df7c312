from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import TrainingArguments

from axolotl.core.trainers.grpo.schedule import check_schedule
from axolotl.errors import ConfigError
from axolotl.utils.schemas.training import Scheduler

NEEDS = {
    "warmup_stable_decay": {"num_decay_steps": 3},
    "cosine_with_min_lr": {"min_lr": 1e-8},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
}


def check(tmp_path: Path, name: str, settings: dict[str, Any] | None, *, steps: int = 10, **options: Any) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        lr_scheduler_type=name,
        lr_scheduler_kwargs=settings,
        learning_rate=1e-6,
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=1,
        **options,
    )
    check_schedule(args, steps)


@pytest.mark.parametrize("name", get_args(Scheduler))
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (10, 0.1), (10, 50)])
def test_every_schedule_can_be_used(name: str, steps: int, warmup: float, tmp_path: Path) -> None:
    check(tmp_path, name, NEEDS.get(name), steps=steps, warmup_steps=warmup)


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("warmup_stable_decay", None, "needs num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": "many"}, "num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "steep"}, "steep"),
        ("cosine_with_min_lr", None, "min_lr"),
        ("cosine_with_min_lr", {"min_lr": 1e-8, "min_lr_rate": 0.1}, "Only one of"),
        ("cosine", {"num_cyles": 2}, "takes no num_cyles"),
        ("cosine", {"num_cycles": "many"}, "num_cycles"),
        ("cosine", {"num_training_steps": 2}, "takes no num_training_steps"),
        ("constant", {"num_cycles": 2}, "takes nothing"),
        ("linear", {"power": 2}, "takes no power"),
        ("polynomial", {"lr_end": 1e-3}, "lr_end (0.001) must be smaller"),
        ("polynomial", {"lr_end": -1e-3}, "would become -0.0"),
        ("polynomial", {"power": -1}, "lr_scheduler_kwargs"),
        ("inverse_sqrt", {"timescale": "long"}, "timescale"),
        ("reduce_lr_on_plateau", {"factor": 2}, "actor"),
        ("reduce_lr_on_plateau", {"patiense": 2}, "takes no patiense"),
        ("reduce_lr_on_plateau", {"patience": "long"}, "patience"),
        ("greedy", {"windows": 2}, "takes no windows"),
    ],
)
def test_what_a_schedule_cannot_use(name: str, settings: dict[str, Any] | None, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, name, settings)
    report = str(caught.value.report())
    assert caught.value.code == "E-CFG-12" and "lr_scheduler" in report and wanted in report
