from types import SimpleNamespace

import pytest
import torch

from axolotl.loaders.device import GpuPlan, pick_device, plan_gpus, resolve_server_dtype, visible_gpus


def test_without_gpus_there_is_nothing_to_share() -> None:
    assert plan_gpus([], num_for_server=1) == GpuPlan(None, None)
    assert visible_gpus() == [] or all(visible_gpus())


def test_the_trainer_sees_one_gpu_and_says_which() -> None:
    plan = plan_gpus(["2", "5"], num_for_server=0)
    assert (plan.trainer, plan.server) == ("2", None) and "2 GPUs are visible" in plan.note
    assert plan_gpus(["0"], num_for_server=0) == GpuPlan(None, None)


def test_a_managed_server_gets_the_first_and_the_trainer_the_next() -> None:
    plan = plan_gpus(["0", "1", "2", "3"], num_for_server=2)
    assert (plan.server, plan.trainer) == ("0,1", "2")


def test_one_gpu_is_shared_with_a_word_about_memory() -> None:
    plan = plan_gpus(["0"], num_for_server=1)
    assert (plan.server, plan.trainer) == ("0", "0") and "gpu_memory_utilization" in plan.note


def test_auto_dtype_is_float32_on_a_cpu_and_the_checkpoints_elsewhere() -> None:
    assert resolve_server_dtype("auto", device="cpu", fallback="bfloat16") == "float32"
    assert resolve_server_dtype("auto", device="cuda", fallback="float16") == "float16"
    assert resolve_server_dtype("bf16", device="cpu") == "bfloat16"
    with pytest.raises(ValueError, match="unknown dtype 'int9'"):
        resolve_server_dtype("int9", device="cpu")


def test_a_named_device_is_taken_as_it_is() -> None:
    assert pick_device("cpu") == "cpu"


@pytest.mark.parametrize(("accelerator", "device"), [("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu"), (None, "cpu")])
def test_the_accelerator_unless_it_lacks_float64(
    accelerator: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type=accelerator))
    assert pick_device("auto") == device
