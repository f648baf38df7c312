"""A training run with a server of its own that somebody kills: where the run is, what it trained on, what is left."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from axolotl.serving.server_file import ServerFile, read_server_file
from axolotl.serving.wire import Health, Progress
from tests.support.cli import Running, free_port, running
from tests.support.project import make_project, metrics

# Written by the reward function, one line a batch that it was asked about.
SEEN = "seen.jsonl"
# In the environment of a run and of everything that it starts, however orphaned.
MARK = "AXOLOTL_TEST_MARK"

REWARDS = """

import json


def seen(prompts, completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    batch = [[prompt[0]["content"], text] for prompt, text in zip(prompts, texts)]
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps(batch) + "\\n")
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]
"""


def disturbed_project(directory: Path, model: Path, steps: int, *, is_managed: bool = True, **overrides: Any) -> int:
    """Write a project whose steps take about a second, most of it generation; returns the server's port."""
    port = free_port()
    settings: dict[str, Any] = {
        "trl__use_vllm": True,
        "trl__vllm_lora_sync": True,
        "trl__max_completion_length": 256,
        "trl__reward_funcs": ["project_rewards.seen"],
        "trl__vllm_server_timeout": 40,
        "vllm__port": port,
        "vllm__managed": is_managed,
        "vllm__sync_dir": str(directory / "sync"),
        "gradient_accumulation_steps": 4,
        "num_questions": 24,
        "learning_rate": 1e-3,
        "max_steps": steps,
    }
    make_project(directory, model, **{**settings, **overrides})
    with (directory / "project_rewards.py").open("a") as file:
        file.write(REWARDS)
    return port


def batches(directory: Path) -> list[list[list[str]]]:
    """`[prompt, completion]` pairs of each batch that was scored, in order; not one that is being written."""
    file = directory / SEEN
    if not file.exists():
        return []
    *complete, _ = file.read_text().split("\n")
    return [json.loads(line) for line in complete]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 120.0, tick_s: float = 0.005) -> Any:
    """What `condition` returns once that is true."""
    deadline, tick = time.monotonic() + timeout_s, threading.Event()
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        tick.wait(tick_s)
    return result


@dataclass
class Disturbed:
    """A run with the means to see where it is. mark: in the environment of all its processes."""

    directory: Path
    train: Running
    mark: str
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=1.0, trust_env=False))

    @property
    def num_scored(self) -> int:
        """Batches that were scored; the trainer works on the last of them or on its successor."""
        return len(batches(self.directory))

    def server(self) -> ServerFile | None:
        """The newest server that has said who it is and lives."""
        found = read_server_file(self.directory / "sync")
        return found if found is not None and found.is_alive() else None

    def engine_child(self) -> psutil.Process | None:
        """The engine's process of its own, where it has one (vLLM)."""
        server = self.server()
        if server is None:
            return None
        with suppress(psutil.Error):
            children = psutil.Process(server.pid).children(recursive=True)
            return next((child for child in children if "EngineCore" in child.name()), None)
        return None

    def is_generating(self) -> bool:
        server = self.server()
        if server is None:
            return False
        headers = {"authorization": f"Bearer {server.token}"}
        try:
            progress = Progress.model_validate_json(self._http.get(f"{server.url}/progress/", headers=headers).content)
        except (httpx.TransportError, ValueError):
            return False
        return progress.running > 0 and progress.generated > 0

    def is_loading(self) -> bool:
        server = self.server()
        if server is None:
            return False
        with suppress(httpx.TransportError, ValueError):
            return Health.model_validate_json(self._http.get(f"{server.url}/health/").content).status == "loading"
        return False

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
        """As `wait_until`, failing at once with the output when the run has ended."""

        def check() -> Any:
            result = condition()
            assert result or self.train.process.poll() is None, f"the run ended before: {what}\n{self.train.output}"
            return result

        return wait_until(check, what, timeout_s)

    def close(self) -> None:
        self._http.close()


@contextmanager
def disturbed(directory: Path, *arguments: str) -> Iterator[Disturbed]:
    """`axolotl train` in `directory`; afterwards nothing of it is left, and it has 10 seconds for that."""
    mark = uuid.uuid4().hex
    with running(directory, "train", "config.yaml", *arguments, **{MARK: mark}) as train:
        run = Disturbed(directory, train, mark)
        try:
            yield run
        finally:
            run.close()
    assert_nothing_left(mark)


def marked(mark: str) -> list[psutil.Process]:
    """Living processes of the run with this mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def assert_nothing_left(mark: str) -> None:
    wait_until(lambda: not marked(mark), "all processes of the run gone", timeout_s=10, tick_s=0.2)


def assert_equal_runs(disturbed: Path, undisturbed: Path, output: str = "out") -> None:
    """Same prompts in the same order, same completions and rewards, the versions that were asked for."""
    assert batches(disturbed) == batches(undisturbed)
    ours, theirs = metrics(disturbed / output), metrics(undisturbed / output)
    assert [step["step"] for step in ours] == [step["step"] for step in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["reward"] == other["reward"]
        assert abs(mine["loss"] - other["loss"]) < 1e-5
        assert mine["staleness/max"] == 0
        # A completion of other weights than those it was asked of would differ by far more.
        assert mine["sampling/sampling_logp_difference/max"] < 1e-3
