"""The main job against real vLLM, as a user runs it: `axolotl vllm-serve` and `axolotl train`, each a process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from axolotl.serving.client import ServerClient
from tests.support.cli import free_port, run, running
from tests.support.project import make_project, metrics
from tests.support.reference import load_reference, reference_logprobs
from tests.support.running_engine import RunningEngine, score

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8, 9]
TOKENS = [20, 300, 41, 7, 99, 350]
TEMPERATURE = 0.9
STEPS = 3


def test_training_against_vllm(tmp_path: Path, tiny_model: Path, vllm_engine: RunningEngine) -> None:
    before = score(vllm_engine, PROMPT, TOKENS)
    torch.set_num_threads(1)
    port = free_port()
    make_project(
        tmp_path,
        tiny_model,
        trl__use_vllm=True,
        trl__vllm_lora_sync=True,
        trl__temperature=TEMPERATURE,
        vllm={"engine": "vllm", "port": port, "sync_dir": str(tmp_path / "sync"), "max_model_len": 128},
        max_steps=STEPS,
        learning_rate=5e-2,
    )
    with running(tmp_path, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after", timeout_s=400)
        trained = run(tmp_path, "train", "config.yaml", timeout_s=300)
        assert trained.code == 0, trained.stderr
        check_steps(tmp_path / "out")
        with ServerClient(f"http://127.0.0.1:{port}", tmp_path / "sync", 60) as client:
            check_last_push(client, tiny_model, tmp_path / "out")
        assert "throughput" not in server.output, "vLLM's statistics are counted, not logged"
        check_nothing_outlives(psutil.Process(server.process.pid))
    assert score(vllm_engine, PROMPT, TOKENS) == before, "another server's engine is untouched"


def check_steps(output: Path) -> None:
    """In every step the server's log-probs of what it sampled are the trainer's own."""
    steps = metrics(output)
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    for entry in steps:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3


def check_last_push(client: ServerClient, model: Path, output: Path) -> None:
    """The server holds the saved policy: its log-probs of fixed tokens are PEFT's and no longer the base model's."""
    info = client.wait_ready(None)
    assert (info.engine, info.dtype, info.run_id) == ("vllm", "float32", None)
    assert info.adapter_version > 0
    trained = client.score([PROMPT], [TOKENS], TEMPERATURE, info.adapter_version)[0]
    untrained = client.score([PROMPT], [TOKENS], TEMPERATURE, 0)[0]
    saved, base = load_reference(model, output), load_reference(model)
    assert trained == pytest.approx(reference_logprobs(saved, PROMPT, TOKENS, TEMPERATURE), abs=1e-3)
    assert untrained == pytest.approx(reference_logprobs(base, PROMPT, TOKENS, TEMPERATURE), abs=1e-3)
    assert max(abs(new - old) for new, old in zip(trained, untrained, strict=True)) > 1e-2


def check_nothing_outlives(server: psutil.Process) -> None:
    """A killed server takes its engine processes with it, though nothing of ours runs any more that could stop them."""
    family = server.children(recursive=True)
    assert any("EngineCore" in process.name() for process in family)
    server.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, [process.as_dict(["pid", "name", "status"]) for process in alive]
