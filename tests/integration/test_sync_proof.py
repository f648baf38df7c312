"""The proof of sync over the transformers engine, with the trainer and the server's app in this process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from axolotl.cli.main import main
from axolotl.core.trainers.grpo.weight_sync.delivery import Delivery
from axolotl.core.trainers.grpo.weight_sync.full_weights import FullWeights
from axolotl.core.trainers.grpo.weight_sync.lora_files import LoraFiles
from axolotl.core.trainers.grpo.weight_sync.probe import PolicyProbe, Probe
from axolotl.core.trainers.grpo.weight_sync.proof import ProvenSync
from axolotl.errors import SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.engines.protocol import Engine, EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.fingerprint import fingerprint
from axolotl.serving.link import ServerLink
from axolotl.serving.wire import CANARY_VERSION
from tests.support.live_server import LiveServer, live_server
from tests.support.lying import HONEST, Lie, LyingEngine, with_the_base_model
from tests.support.project import metrics
from tests.support.reference import load_reference, reference_logprobs
from tests.support.sync_suite import FULL, Serve, SyncSuite, Trainers, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT, TOKENS = [5, 6, 7, 8], [40, 41, 42, 43, 44]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def serve(sync_project: Path, tiny_model: Path) -> Serve:
    """`serve(lie)`; `engine` for another class, `dtype` and the options of `live_server`."""

    def serve(
        lie: Lie = HONEST,
        *,
        engine: type[TransformersEngine] = TransformersEngine,
        dtype: str = "float32",
        **options: Any,
    ) -> Any:
        settings = EngineSettings(
            model=str(tiny_model),
            revision=None,
            device="cpu",
            dtype=dtype,
            max_model_len=128,
            max_lora_rank=8,
            max_loras=3,
        )
        return live_server(sync_project / "sync", functools.partial(lying, engine, settings, lie), **options)

    return serve


async def lying(engine: type[TransformersEngine], settings: EngineSettings, lie: Lie) -> Engine:
    return LyingEngine(await engine.create(settings), lie)


class TestTransformersSync(SyncSuite):
    pass


def test_the_canary_leaves_no_trace_in_what_is_trained(serve: Serve, sync_project: Path) -> None:
    """The same run in process, which needs no canary, has the same losses and weights."""
    with serve() as server:
        assert train(server, "--output_dir", "served", "--trl.vllm_importance_sampling_correction", "false") == 0
    assert (
        main(["train", "config.yaml", "--output_dir", "alone", "--trl.use_vllm=false", "--trl.vllm_lora_sync=false"])
        == 0
    )
    served, alone = (load_file(sync_project / name / "adapter_model.safetensors") for name in ("served", "alone"))
    for name, value in alone.items():
        torch.testing.assert_close(served[name], value, atol=1e-4, rtol=1e-3)


def scored(server: LiveServer, version: int) -> list[float]:
    with server.client() as client:
        client.wait_ready()
        return client.score([PROMPT], [TOKENS], 1.0, version)[0]


@pytest.mark.parametrize(
    "options",
    [
        ["--adapter", "null"],
        ["--peft_use_dora", "true"],
        ["--lora_modules_to_save", "[norm]", "--lora_target_linear=false", "--lora_target_modules", "[q_proj,up_proj]"],
        ["--peft_init_lora_weights", "pissa"],
    ],
    ids=["full", "dora", "modules_to_save", "pissa"],
)
def test_all_the_weights_arrive_where_no_adapter_is_sent(
    options: list[str], serve: Serve, sync_project: Path, tiny_model: Path, trainers: Trainers
) -> None:
    with serve() as server:
        assert train(server, "--trl.vllm_lora_sync=false", "--max_steps", "3", "--learning_rate", "5e-3", *options) == 0
        steps = metrics(sync_project / "out")
        assert len(steps) == 3
        assert max(step["sync/logp_gap"] for step in steps) < 1e-4
        assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
        assert steps[-1]["sync/logp_distance"] > 1e-3
        served = scored(server, 4)
    policy = trainers[0].policy().eval()
    assert served == pytest.approx(reference_logprobs(policy, PROMPT, TOKENS), abs=1e-3)
    base = reference_logprobs(load_reference(tiny_model), PROMPT, TOKENS)
    assert max(abs(a - b) for a, b in zip(served, base, strict=True)) > 1e-3
    # The run that is over holds nothing but the version that is served.
    (directory,) = (sync_project / "sync" / "weights").glob("run-*/")
    assert [path.name for path in directory.iterdir()] == ["v4"]


@pytest.mark.parametrize("is_corrected", [True, False])
def test_the_kept_mass_makes_the_ratio_one(
    is_corrected: bool, serve: Serve, sync_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class KeepsItToItself(TransformersEngine):
        """As vLLM, which does not say what its filters kept."""

        async def generate(self, *args: Any) -> Any:
            async for group in super().generate(*args):
                silent = [item.model_copy(update={"log_kept": None}) for item in group.completions]
                yield group.model_copy(update={"completions": silent})

    engine = TransformersEngine if is_corrected else KeepsItToItself
    with serve(engine=engine) as server:
        assert train(server, "--trl.top_p", "0.5", "--max_steps", "2") == 0
    error = capsys.readouterr().err
    means = [step["sampling/importance_sampling_ratio/mean"] for step in metrics(sync_project / "out")]
    if is_corrected:
        assert means == pytest.approx([1.0, 1.0], abs=1e-3)
        assert "warning" not in error
    else:
        assert max(means) < 0.9
        assert error.count("the mean importance ratio is 0.") == 1


def test_a_server_that_would_drop_versions_too_early_is_refused_before_the_model_is_loaded(
    serve: Serve, trainers: Trainers, capsys: pytest.CaptureFixture[str]
) -> None:
    prefetch = ["--trl.use_data_producer", "true", "--trl.async_prefetch", "true", "--trl.prefetch_depth"]
    with serve(max_held=4) as server:
        assert train(server, *prefetch, "3") == 7
        error = capsys.readouterr().err
        assert "E-SYN-09" in error and "needs 5 adapter versions" in error and "the server holds 4" in error
        assert "set trl.prefetch_depth to 2" in error
        assert trainers == []
        assert train(server, *prefetch, "2", "--max_steps", "1") == 0


# Half precision


@pytest.mark.parametrize("options", [[], FULL], ids=["adapter", "full"])
def test_a_server_in_half_precision_is_not_refused_for_its_noise(
    options: list[str], serve: Serve, sync_project: Path
) -> None:
    """Full weights begin as the base model: nearer to the server's own numbers than to the trainer's."""
    with serve(dtype="bfloat16") as server:
        assert train(server, *options) == 0
    steps = metrics(sync_project / "out")
    assert len(steps) == 4
    assert 1e-4 < steps[0]["sync/logp_noise"] < 0.05
    assert max(step["sync/logp_gap"] for step in steps) < 0.1


@pytest.mark.parametrize("options", [[], FULL], ids=["adapter", "full"])
def test_a_server_in_half_precision_that_stands_still_is_caught(
    options: list[str], serve: Serve, sync_project: Path, tiny_model: Path, trainers: Trainers
) -> None:
    def answers(version: int) -> int:
        return 1 if 1 < version < CANARY_VERSION else version

    def loads(version: int, directory: Path) -> Path:
        return tiny_model if version < CANARY_VERSION else directory

    with serve(Lie(answers, answers) if not options else Lie(loads=loads), dtype="bfloat16") as server:
        assert train(server, *options) == 7
    assert trainers[0].state.global_step == 1


# A server that was restarted


@pytest.fixture
def policy(tiny_model: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert isinstance(model, PeftModel)
    return model.eval()


@torch.no_grad()
def step(policy: PeftModel) -> None:
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05)


@pytest.mark.parametrize("has_adapter", [True, False])
@pytest.mark.parametrize("is_honest", [True, False])
def test_after_a_restart_the_way_is_proven_again(
    has_adapter: bool, is_honest: bool, serve: Serve, sync_project: Path, tiny_model: Path, policy: PeftModel
) -> None:
    """The second process ignores what it is sent, or does not. Until the next push the model is not touched."""
    forwards: list[None] = []

    def model() -> Any:
        forwards.append(None)
        return policy

    with ExitStack() as stack:
        with serve() as server:
            client = stack.enter_context(server.client())
            sync = proven(client, sync_project / "sync", tiny_model, model, has_adapter=has_adapter)
            for version in (1, 2, 3):
                sync.push(version)
                expected = reference_logprobs(policy, PROMPT, TOKENS)
                step(policy)
            assert client.score([PROMPT], [TOKENS], 1.0, 3)[0] == pytest.approx(expected, abs=1e-4)
        forwards.clear()
        deaf = Lie.about(with_the_base_model) if has_adapter else Lie(loads=lambda *_: tiny_model)
        port = int(server.url.rpartition(":")[2])
        stack.enter_context(serve(HONEST if is_honest else deaf, port=port, instance_id="instance-2"))
        if not is_honest:
            named = "the canary" if has_adapter else "policy version 3"
            with pytest.raises(SyncError, match=f"does not generate with {named}"):
                client.score([PROMPT], [TOKENS], 1.0, 3)
            return
        assert client.score([PROMPT], [TOKENS], 1.0, 3)[0] == pytest.approx(expected, abs=1e-4)
        assert client.info.instance_id == "instance-2" and not forwards
        sync.push(4)
        assert ("sync/canary" in sync.metrics) == (not has_adapter)
        expected = reference_logprobs(policy, PROMPT, TOKENS)
        assert client.score([PROMPT], [TOKENS], 1.0, 4)[0] == pytest.approx(expected, abs=1e-4)


def proven(client: ServerClient, sync_dir: Path, model: Path, policy: Any, *, has_adapter: bool) -> ProvenSync:
    """The trainer's side past its claim."""
    client.wait_ready()
    client.claim("run-0123456789ab", fingerprint(str(model), None, False))
    link = ServerLink(client, sync_dir / "adapters" / "run-0123456789ab")
    delivery: Delivery = FullWeights(policy, client, link.weights_directory)
    if has_adapter:
        delivery = LoraFiles(policy, client, link.directory)
    probe = PolicyProbe(policy, Probe.of_prompt(range(10, 60), 128), 1.0)
    return ProvenSync(delivery, client, probe, tolerance=1e-3, check_interval=1)
