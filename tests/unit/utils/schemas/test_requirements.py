"""Packages that a config needs, against a machine where none, or all, of the optional ones are installed."""

import pytest

from axolotl.cli.config import config_from_mapping
from axolotl.utils.schemas.requirements import missing_packages


def config(trl=None, **options):
    return config_from_mapping(
        {
            "base_model": "m",
            "rl": "grpo",
            "micro_batch_size": 8,
            "datasets": [{"path": "a"}],
            "trl": {"reward_funcs": ["r.f"], **(trl or {})},
            **options,
        }
    )


@pytest.mark.parametrize(
    ("options", "reporters", "missing"),
    [
        ({}, [], {}),
        ({}, ["wandb", "trackio"], {"axolotl[wandb]": "report_to: wandb", "trackio": "report_to: trackio"}),
        ({"optimizer": "paged_adamw_32bit"}, [], {"axolotl[bitsandbytes]": "optimizer: paged_adamw_32bit"}),
        ({"optimizer": "adamw_8bit"}, [], {"axolotl[bitsandbytes]": "optimizer: adamw_8bit"}),
        ({"optimizer": "adamw_torch_8bit"}, [], {"torchao": "optimizer: adamw_torch_8bit"}),
        ({"optimizer": "galore_adamw"}, [], {"galore-torch": "optimizer: galore_adamw"}),
        ({"optimizer": "adafactor"}, [], {}),
        ({"adapter": "qlora", "load_in_4bit": True}, [], {"axolotl[bitsandbytes]": "adapter: qlora"}),
        ({"adapter": "lora", "load_in_8bit": True}, [], {"axolotl[bitsandbytes]": "load_in_8bit: true"}),
        ({"trl": {"use_liger_loss": True}}, [], {"axolotl[liger]": "trl.use_liger_loss: true"}),
        ({"trl": {"use_vllm": True, "weight_sync": "nccl"}}, [], {"axolotl[vllm]": "trl.weight_sync: nccl"}),
        ({"trl": {"use_vllm": True, "weight_sync": "auto"}}, [], {}),
        ({"trl": {"weight_sync": "nccl"}}, [], {}),
    ],
)
def test_what_has_to_be_installed(options, reporters, missing):
    made = config(**options)
    assert missing_packages(made, reporters, is_installed=lambda name: False) == missing
    assert missing_packages(made, reporters, is_installed=lambda name: True) == {}


def test_installed_packages_are_found():
    assert missing_packages(config(), ["yaml", "no_such_package"]) == {"no_such_package": "report_to: no_such_package"}
