"""The main job against real vLLM, as a user runs it: `axolotl vllm-serve` and `axolotl train`, each a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from axolotl.serving.client import ServerClient
from tests.support.cli import free_port, run, running
from tests.support.project import make_project, metrics
from tests.support.reference import load_reference, reference_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8, 9]
TOKENS = [20, 300, 41, 7, 99, 350]
TEMPERATURE = 0.9
STEPS = 3

#: A reward function is user code that runs between a push and the next optimizer step: the place to look at the server.
PROBE = """
import json, pathlib, shutil

from axolotl.serving.client import ServerClient


def probe(completions, **kwargs):
    here = pathlib.Path({directory!r})
    with ServerClient({url!r}, here / "sync", 60) as client:
        info = client.wait_ready(None)
        version = info.adapter_version
        scores = {{
            v: client.score([{prompt}], [{tokens}], {temperature}, v)[0] for v in (0, version)
        }}
    published = here / "sync" / "adapters" / info.run_id / f"v{{version}}"
    shutil.copytree(published, here / "probes" / f"v{{version}}")
    (here / "probes" / f"v{{version}}.json").write_text(json.dumps({{"engine": info.engine, "scores": scores}}))
    return [0.0] * len(completions)
"""


def project(directory: Path, model: Path) -> str:
    """Write the project; returns the server's address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    make_project(
        directory,
        model,
        trl__use_vllm=True,
        trl__vllm_lora_sync=True,
        trl__temperature=TEMPERATURE,
        trl__reward_funcs=["project_rewards.vowels", "project_probe.probe"],
        vllm={"engine": "vllm", "port": port, "sync_dir": str(directory / "sync"), "max_model_len": 128},
        max_steps=STEPS,
        learning_rate=5e-2,
    )
    probe = PROBE.format(directory=str(directory), url=url, prompt=PROMPT, tokens=TOKENS, temperature=TEMPERATURE)
    (directory / "project_probe.py").write_text(probe)
    (directory / "probes").mkdir()
    return url


def probes(directory: Path) -> dict[int, dict[str, Any]]:
    return {int(file.stem[1:]): json.loads(file.read_text()) for file in sorted(directory.glob("probes/v*.json"))}


def largest_gap(left: list[float], right: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(left, right, strict=True))


def test_training_against_vllm(tmp_path: Path, tiny_model: Path) -> None:
    torch.set_num_threads(1)
    url = project(tmp_path, tiny_model)
    with running(tmp_path, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after", timeout_s=400)
        trained = run(tmp_path, "train", "config.yaml", timeout_s=300)
        assert trained.code == 0, trained.stderr
        check_steps(tmp_path)
        check_pushes(tmp_path, tiny_model)
        with ServerClient(url, tmp_path / "sync", 60) as client:
            assert client.wait_ready(None).run_id is None, "the run gave the server back"
        check_nothing_outlives(psutil.Process(server.process.pid))


def check_steps(directory: Path) -> None:
    steps = metrics(directory / "out")
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    for entry in steps:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3, "server and trainer agree on sampled tokens"


def check_pushes(directory: Path, model: Path) -> None:
    """After each push the server's log-probs are those of the published adapter under PEFT, and soon not the base's."""
    seen = probes(directory)
    assert len(seen) == STEPS, "one version a step"
    base = reference_logprobs(load_reference(model), PROMPT, TOKENS, TEMPERATURE)
    for version, entry in seen.items():
        assert entry["engine"] == "vllm"
        trainers = load_reference(model, directory / "probes" / f"v{version}")
        expected = reference_logprobs(trainers, PROMPT, TOKENS, TEMPERATURE)
        assert entry["scores"][str(version)] == pytest.approx(expected, abs=1e-3)
        assert entry["scores"]["0"] == pytest.approx(base, abs=1e-3)
    last = seen[max(seen)]["scores"][str(max(seen))]
    assert largest_gap(last, base) > 1e-2, "training has moved the policy, and the server with it"
    saved = load_file(directory / "out" / "adapter_model.safetensors")
    published = load_file(directory / "probes" / f"v{max(seen)}" / "adapter_model.safetensors")
    assert saved.keys() == published.keys()
    assert any(not torch.equal(saved[name], published[name]) for name in saved), (
        "the last step came after the last push"
    )


def check_nothing_outlives(server: psutil.Process) -> None:
    """A killed server takes its engine processes with it, though nothing of ours runs any more that could stop them."""
    family = server.children(recursive=True)
    assert any("EngineCore" in process.name() for process in family)
    server.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, [process.as_dict(["pid", "name", "status"]) for process in alive]
