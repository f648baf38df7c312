"""Hundreds of adapter syncs to one server that is never idle, watched from outside: does anything pile up?

    python -m tests.campaigns.soak --syncs 500

The slope of the memory is a median (`slope.py`): a request that happens to be large while a sample is taken, or a
single step of the allocator, moves a least-squares line but not this one. Samples begin when a fifth of the syncs is
done: until then caches fill and thread pools reach their size. A training run is watched as well (`trainer_soak.py`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import torch
import yaml
from safetensors.torch import load_file, save_file

from axolotl.serving.manifest import write_manifest
from axolotl.serving.server_file import read_server_file
from axolotl.serving.supervisor import serve_command
from axolotl.serving.wire import AdapterResponse, GenerateRequest, Sampling, ServerInfo
from tests.campaigns import trainer_soak
from tests.campaigns.slope import slope_per_100
from tests.support.live_server import LiveServer
from tests.support.tiny_model import make_random_adapter, make_tiny_model

RUN = "run-50a4c0ffee00"
NUM_CLIENTS = 2
START_S = 120.0
ANSWER_S = 60.0
MAX_SLOPE = 1 << 20
"""Bytes per 100 syncs."""
MAX_VERSIONS = 3
"""The current one, the one before, and one more for as long as a request on it runs."""


@dataclass(frozen=True)
class Sample:
    """The server's processes together after `sync` syncs: private memory in bytes, open files, threads; and what it
    holds: adapter versions, and their directories on disk."""

    sync: int
    memory: int
    files: int
    threads: int
    versions: int
    directories: int


@dataclass
class Report:
    """samples: from the end of the warm-up. failures: requests that were not answered 200."""

    num_syncs: int
    samples: list[Sample] = field(default_factory=list)
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def memory_slope(self) -> float:
        """Bytes per 100 syncs."""
        return slope_per_100([(sample.sync, sample.memory) for sample in self.samples])

    def growth(self, name: str) -> int:
        """How much the last half of the samples is above the first half: by its largest value, or by its smallest for
        what comes and goes with requests, since only what has piled up is there all the time."""
        values = [getattr(sample, name) for sample in self.samples]
        half = len(values) // 2
        extreme = min if name in ("versions", "directories") else max
        return extreme(values[half:]) - extreme(values[:half])

    def problems(self, *, with_memory: bool) -> list[str]:
        found = [f"a request failed: {text}" for text in self.failures]
        for name in ("files", "threads", "versions", "directories"):
            if self.growth(name) > 0:
                found.append(f"{name}: {[getattr(sample, name) for sample in self.samples]}")
        found += [
            f"after sync {sample.sync}: {sample.versions} versions in {sample.directories} directories"
            for sample in self.samples
            if sample.versions > MAX_VERSIONS or sample.directories > sample.versions
        ]
        if with_memory and self.memory_slope > MAX_SLOPE:
            found.append(f"memory: {[sample.memory >> 10 for sample in self.samples]} KB")
        if self.num_answers < self.num_syncs:
            found.append(f"only {self.num_answers} requests were answered: it was idle")
        return found

    def __str__(self) -> str:
        grown = ", ".join(f"{name} {self.growth(name):+d}" for name in ("files", "threads", "versions", "directories"))
        return (
            f"{self.num_syncs} syncs, {self.num_answers} requests answered: "
            f"memory {self.memory_slope / (1 << 20):+.2f} MB per 100 syncs, {grown}"
        )


def run(server: LiveServer, process: psutil.Process, template: Path, num_syncs: int) -> Report:
    """Claim the server, push `num_syncs` adapters, and generate with the newest all the while.

    template: a PEFT adapter that the server can load; every version is this one with other numbers.
    """
    report = Report(num_syncs)
    directory = server.sync_dir / "adapters" / RUN
    current, stopped = _Current(), threading.Event()
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=ANSWER_S) as client:
        _claim(client)
        clients = [threading.Thread(target=_ask, args=(server, current, stopped, report)) for _ in range(NUM_CLIENTS)]
        for thread in clients:
            thread.start()
        try:
            for version in range(1, num_syncs + 1):
                digest = _publish(template, directory, version)
                body = {"run_id": RUN, "version": version, "manifest_sha256": digest}
                answer = client.post("/set_lora_adapter/", json=body)
                if answer.status_code != 200:
                    report.failures.append(answer.text)
                    break
                current.version = version
                loaded = AdapterResponse.model_validate_json(answer.content).loaded_versions
                _remove_all_but(directory, loaded)
                if version > num_syncs // 5 and version % max(1, num_syncs // 50) == 0:
                    report.samples.append(_sample(version, process, loaded, directory))
        finally:
            stopped.set()
            for thread in clients:
                thread.join(ANSWER_S)
    return report


@dataclass
class _Current:
    version: int = 0


def _claim(client: httpx.Client) -> None:
    info = ServerInfo.model_validate_json(client.get("/server_info/").raise_for_status().content)
    body = {"run_id": RUN, "host": "elsewhere", "pid": 1, "fingerprint": info.fingerprint.model_dump()}
    client.post("/session/", json=body).raise_for_status()


def _ask(server: LiveServer, current: _Current, stopped: threading.Event, report: Report) -> None:
    """One client: the next request as soon as the last one is answered."""
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=ANSWER_S) as client:
        for number in itertools.count():
            if stopped.is_set():
                return
            request = GenerateRequest(
                request_id=f"soak-{number}",
                adapter_version=current.version,
                prompts=[[5, 6, 7, 8], [9, 10]],
                sampling=Sampling(n=2, max_tokens=4 + number % 8),
                run_id=RUN,
                stream=number % 3 == 0,
            )
            try:
                reply = client.post("/generate/", json=request.model_dump())
            except httpx.HTTPError as problem:
                report.failures.append(repr(problem))
                return
            if reply.status_code != 200 or '"error"' in reply.text:
                report.failures.append(reply.text)
                return
            report.num_answers += 1


def _publish(template: Path, directory: Path, version: int) -> str:
    staged = directory / f".tmp-v{version}"
    staged.mkdir(parents=True)
    shutil.copy(template / "adapter_config.json", staged)
    tensors = load_file(template / "adapter_model.safetensors")
    save_file(
        {name: value * (1 + version / 1e4) for name, value in tensors.items()}, staged / "adapter_model.safetensors"
    )
    digest = write_manifest(staged, version=version, rank=8)
    staged.rename(directory / f"v{version}")
    return digest


def _remove_all_but(directory: Path, versions: list[int]) -> None:
    """As a trainer does: what the server holds no longer is not needed."""
    for path in directory.iterdir():
        if int(path.name.removeprefix("v")) not in versions:
            shutil.rmtree(path)


def _sample(sync: int, process: psutil.Process, loaded: list[int], directory: Path) -> Sample:
    processes = [process, *process.children(recursive=True)]
    return Sample(
        sync=sync,
        memory=sum(each.memory_full_info().uss for each in processes),
        files=sum(each.num_fds() for each in processes),
        threads=sum(each.num_threads() for each in processes),
        versions=len(loaded),
        directories=sum(1 for _ in directory.iterdir()),
    )


@contextmanager
def served(
    directory: Path, model: Path, *, environment: Mapping[str, str] | None = None, **vllm_options: object
) -> Iterator[tuple[LiveServer, psutil.Process]]:
    """`axolotl vllm-serve` as a process of its own, ready; its log is `server.log` in `directory`.

    environment: instead of ours with the model hub switched off.
    """
    sync_dir = directory / "sync"
    config = {
        "base_model": str(model),
        "rl": "grpo",
        "adapter": "lora",
        "lora_r": 8,
        "output_dir": str(directory / "out"),
        "micro_batch_size": 8,
        "learning_rate": 1e-5,
        "vllm": {
            "port": free_port(),
            "max_model_len": 128,
            "sync_dir": str(sync_dir),
            "device": "cpu",
            **vllm_options,
        },
        "trl": {"use_vllm": True, "vllm_lora_sync": True, "max_completion_length": 16},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    if environment is None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            serve_command(directory / "config.yaml"), stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield _when_ready(sync_dir, process, directory / "server.log"), psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _when_ready(sync_dir: Path, process: subprocess.Popen[bytes], log: Path) -> LiveServer:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = read_server_file(sync_dir)
        if found is not None:
            try:
                if httpx.get(f"{found.url}/health/").status_code == 200:
                    return LiveServer(found.url, found.token, sync_dir)
            except httpx.HTTPError:
                pass
        time.sleep(0.1)
    raise AssertionError(f"the server was not ready in time:\n{log.read_text()}")


def run_on_tiny_model(directory: Path, num_syncs: int) -> Report:
    torch.set_num_threads(1)
    model = make_tiny_model(directory / "model")
    template = make_random_adapter(model, directory / "template")
    with served(directory, model, engine="transformers", device="cpu") as (server, process):
        return run(server, process, template, num_syncs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--syncs", type=int, default=500, help="of the server; 0 leaves this part out")
    parser.add_argument("--steps", type=int, default=2_000, help="of a training run; 0 leaves this part out")
    arguments = parser.parse_args()
    reports: list[Report | trainer_soak.Report] = []
    with tempfile.TemporaryDirectory() as directory:
        if arguments.syncs:
            reports.append(run_on_tiny_model(Path(directory) / "server", arguments.syncs))
        if arguments.steps:
            reports.append(trainer_soak.run_on_tiny_model(Path(directory) / "trainer", arguments.steps))
    problems = [problem for report in reports for problem in report.problems(with_memory=True)]
    for problem in problems:
        print(problem)
    print(f"{'FAILED' if problems else 'passed'}: {'; '.join(map(str, reports))}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
