"""`axolotl train` against `axolotl vllm-serve` with the transformers engine: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl.cli.main import main
from axolotl.serving.client import ServerClient
from axolotl.serving.engines.scoring import score
from tests.support.cli import Running, free_port, run, running
from tests.support.project import make_project, metrics
from tests.support.tiny_model import make_tiny_model

SPEC = Path(__file__).resolve().parents[3] / "shared" / "spec" / "grpo_user_guide.md"


@dataclass(frozen=True)
class Served:
    """A project directory whose config names a server that is running."""

    directory: Path
    port: int
    server: Running

    def client(self) -> ServerClient:
        return ServerClient(f"http://127.0.0.1:{self.port}", self.directory / "sync", 30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    directory, port = tmp_path_factory.mktemp("served"), free_port()
    make_project(
        directory,
        tiny_model,
        trl__use_vllm=True,
        trl__vllm_lora_sync=True,
        vllm__port=port,
        vllm__sync_dir=str(directory / "sync"),
    )
    with running(directory, "vllm-serve", "config.yaml") as server:
        server.wait_for("ready after")
        yield Served(directory, port, server)


@pytest.fixture
def project(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.chdir(served.directory)
    monkeypatch.syspath_prepend(str(served.directory))
    return served


def managed_project(directory: Path, model: Path, **overrides: object) -> int:
    port = free_port()
    settings: dict[str, object] = {
        "trl__use_vllm": True,
        "trl__vllm_lora_sync": True,
        "vllm__port": port,
        "vllm__managed": True,
        "vllm__sync_dir": str(directory / "sync"),
    }
    make_project(directory, model, **{**settings, **overrides})
    return port


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process], timeout_s: float = 30) -> None:
    _, alive = psutil.wait_procs(processes, timeout_s)
    assert not alive, alive


def scored(model: Path, adapter: Path, prompt: list[int], tokens: list[int]) -> list[float]:
    """What a policy that was saved thinks of the tokens."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return score(PeftModel.from_pretrained(base, adapter).eval(), [prompt], [tokens], temperature=1.0)[0]


def test_the_server_ends_with_the_weights_that_were_saved(project: Served, tiny_model: Path) -> None:
    assert main(["train", "config.yaml", "--output_dir", "proof"]) == 0
    steps = metrics(project.directory / "proof")
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
    assert [step["staleness/max"] for step in steps] == [0, 0]

    prompt, tokens = [5, 6, 7, 8], [40, 41, 42, 43, 44]
    with project.client() as client:
        info = client.wait_ready()
        assert info.adapter_version == 3, "the policy after two steps is the third version"
        served = client.score([prompt], [tokens], temperature=1.0, adapter_version=info.adapter_version)[0]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    of_base = score(base, [prompt], [tokens], temperature=1.0)[0]
    trained = PeftModel.from_pretrained(base, project.directory / "proof").eval()
    of_trained = score(trained, [prompt], [tokens], temperature=1.0)[0]
    assert served == pytest.approx(of_trained, abs=1e-3)
    assert max(abs(a - b) for a, b in zip(served, of_base, strict=True)) > 1e-2


JUDGE = """
def judge(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step == 1) + 0.1 * (index % 2) for index in range(len(completions))]
"""


def test_the_server_ends_with_the_best_policy_where_that_is_the_one_that_was_saved(
    project: Served, tiny_model: Path
) -> None:
    """The first of two steps is the best; the evaluation after the second has brought the server to the last policy."""
    (project.directory / "judge_rewards.py").write_text(JUDGE)
    rhythm = ["--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
    best = ["--val_set_size", "0.25", "--load_best_model_at_end", "true", "--metric_for_best_model", "eval_reward"]
    rewards = ["--trl.reward_funcs", "[judge_rewards.judge]"]
    assert main(["train", "config.yaml", "--output_dir", "best", *rhythm, *best, *rewards]) == 0
    out = project.directory / "best"
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 1
    prompt, tokens = [5, 6, 7, 8], [40, 41, 42, 43, 44]
    with project.client() as client:
        version = client.wait_ready().adapter_version
        assert version == 4, "the policies after 0, 1 and 2 steps are the first three versions"
        served = client.score([prompt], [tokens], temperature=1.0, adapter_version=version)[0]
    saved, best_one, last = (
        scored(tiny_model, place, prompt, tokens) for place in (out, out / "checkpoint-1", out / "checkpoint-2")
    )
    assert saved == pytest.approx(best_one, abs=1e-6)
    assert served == pytest.approx(best_one, abs=1e-3)
    assert max(abs(a - b) for a, b in zip(served, last, strict=True)) > 5e-3


def test_runs_follow_each_other_on_one_server_as_on_fresh_ones(project: Served) -> None:
    assert main(["train", "config.yaml", "--output_dir", "first"]) == 0
    assert main(["train", "config.yaml", "--output_dir", "second"]) == 0
    first, second = (metrics(project.directory / name) for name in ("first", "second"))
    for name in ("reward", "loss", "completions/mean_length"):
        assert [step[name] for step in first] == [step[name] for step in second]


def test_the_sync_interval_lets_rollouts_age(project: Served) -> None:
    assert (
        main(["train", "config.yaml", "--output_dir", "aged", "--trl.vllm_sync_interval", "2", "--max_steps", "3"]) == 0
    )
    assert [step["staleness/max"] for step in metrics(project.directory / "aged")] == [0, 1, 0]


def test_evaluation_judges_the_weights_of_its_own_moment(project: Served) -> None:
    evaluate = ["--val_set_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "1"]
    arguments = ["--output_dir", "judged", "--trl.vllm_sync_interval", "2", *evaluate]
    assert main(["train", "config.yaml", *arguments]) == 0
    lines = (project.directory / "judged" / "metrics.jsonl").read_text().splitlines()
    gaps = [json.loads(line).get("eval_sampling/sampling_logp_difference/max") for line in lines]
    gaps = [gap for gap in gaps if gap is not None]
    # Weights of an optimizer step earlier would disagree by far more at this learning rate.
    assert len(gaps) == 2 and max(gaps) < 1e-3


def test_a_server_that_is_too_short_for_the_prompts_is_named_before_training(
    project: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "config.yaml", "--output_dir", "long", "--trl.max_completion_length", "505"]) == 2
    assert "E-CFG-14" in capsys.readouterr().err


def test_another_base_model_is_refused_before_training(
    project: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    assert main(["train", "config.yaml", "--output_dir", "other", "--base_model", str(other)]) == 6
    assert "E-SRV-07" in capsys.readouterr().err


def test_another_tokenizer_is_refused_before_training(
    project: Served, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tokens have changed places in the one that the trainer is told to use."""
    other = tmp_path / "tokenizer"
    shutil.copytree(tiny_model, other)
    description = json.loads((other / "tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(description))
    assert main(["train", "config.yaml", "--output_dir", "other", "--tokenizer_config", str(other)]) == 6
    error = capsys.readouterr().err
    assert "E-SRV-07" in error and "tokenizer (the same id means different tokens)" in error


def test_a_taken_port_ends_a_second_server(project: Served) -> None:
    second = run(project.directory, "vllm-serve", "config.yaml")
    assert second.code == 3
    assert "E-ENV-02" in second.stderr and str(project.port) in second.stderr and "Traceback" not in second.stderr


def test_without_a_server_the_run_ends_in_its_own_time(project: Served, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--vllm.port", str(free_port()), "--trl.vllm_server_timeout", "5", "--output_dir", "lonely"]
    assert main(["train", "config.yaml", *arguments]) == 6
    error = capsys.readouterr().err
    assert "E-SRV-01" in error and "axolotl vllm-serve" in error


def test_managed_server_is_started_and_stopped(tmp_path: Path, tiny_model: Path) -> None:
    managed_project(tmp_path, tiny_model)
    with running(tmp_path, "train", "config.yaml") as train:
        train.wait_for("generating with the transformers engine")
        servers = descendants(train.process.pid)
        assert servers
        assert train.wait() == 0
        assert_gone(servers)
    assert "\r" not in train.output and "\x1b" not in train.output
    assert len(metrics(tmp_path / "out")) == 2


def test_managed_server_does_not_outlive_a_killed_trainer(tmp_path: Path, tiny_model: Path) -> None:
    managed_project(tmp_path, tiny_model)
    with running(tmp_path, "train", "config.yaml", "--max_steps", "1000") as train:
        train.wait_for("step 1/1000")
        servers = descendants(train.process.pid)
        assert servers
        train.process.send_signal(signal.SIGKILL)
        train.process.wait(10)
        assert_gone(servers)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_at_the_next_step(number: signal.Signals, code: int, tmp_path: Path, tiny_model: Path) -> None:
    managed_project(tmp_path, tiny_model)
    with running(tmp_path, "train", "config.yaml", "--max_steps", "1000") as train:
        train.wait_for("step 2/1000")
        servers = descendants(train.process.pid)
        os.kill(train.process.pid, number)
        assert train.wait() == code
        assert_gone(servers)
    assert "E-SIG-01" in train.output and "--resume" in train.output and "Traceback" not in train.output
    saved = re.search(r"saved\s+\S*checkpoint-(\d+)", train.output)
    assert saved and (tmp_path / "out" / f"checkpoint-{saved[1]}" / "optimizer.pt").exists()
    if number == signal.SIGINT:
        resumed = run(tmp_path, "train", "config.yaml", "--resume", "--max_steps", str(int(saved[1]) + 1))
        assert resumed.code == 0, resumed.stderr


def guide_files() -> tuple[str, str]:
    """`rewards.py` and `config.yaml` of the guide's quick start."""
    if not SPEC.exists():
        pytest.skip("the user guide is not beside this checkout")
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", SPEC.read_text(), re.DOTALL)
    rewards = next(text for kind, text in blocks if kind == "python" and text.startswith("# rewards.py"))
    config = next(text for kind, text in blocks if kind == "yaml" and text.startswith("base_model:"))
    return rewards, config


def test_the_guides_quick_start_in_two_terminals(tmp_path: Path, tiny_model: Path) -> None:
    """Only the model and the data set point somewhere local; ports, lengths and steps are made small on the way."""
    rewards, config = guide_files()
    config = config.replace("Qwen/Qwen2.5-1.5B-Instruct", str(tiny_model)).replace("openai/gsm8k", "questions.jsonl")
    make_project(tmp_path, tiny_model)
    rows = (tmp_path / "questions.jsonl").read_text().replace('"answer": "', '"answer": "so it is #### ')
    (tmp_path / "questions.jsonl").write_text(rows)
    (tmp_path / "rewards.py").write_text(rewards)
    (tmp_path / "config.yaml").write_text(config)
    port = str(free_port())
    small = ["--vllm.port", port, "--trl.vllm_server_port", port, "--vllm.max_model_len", "512"]
    small += ["--trl.max_completion_length", "16", "--max_steps", "2"]
    home = {
        "HOME": str(tmp_path / "home"),
        "HF_HOME": os.environ.get("HF_HOME", str(Path.home() / ".cache/huggingface")),
    }
    with running(tmp_path, "vllm-serve", "config.yaml", *small, **home) as server:
        server.wait_for("ready after")
        train = run(tmp_path, "train", "config.yaml", *small, **home)
        assert train.code == 0, train.stderr
        assert "reachable from every network" in server.output
    (first, _) = metrics(tmp_path / "grpo-output")
    assert {"rewards/accuracy_reward/mean", "rewards/format_reward/mean"} <= first.keys()
    # Two prompts' worth of micro-batches of 2: one group of 8 a step.
    assert first["num_tokens"] > 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "grpo-output")
    assert tokenizer.pad_token
