"""Client, app and transformers engine together."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch

from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.fingerprint import fingerprint
from axolotl.serving.manifest import write_manifest
from axolotl.serving.wire import GenerateRequest, Sampling
from tests.support.live_server import live_server
from tests.support.tiny_model import make_random_adapter, make_tiny_model

torch.set_num_threads(1)


def test_first_thread(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    settings = EngineSettings(
        model=str(model), revision=None, device="cpu", dtype="float32", max_model_len=128, max_lora_rank=8, max_loras=3
    )
    with (
        live_server(tmp_path / "sync", functools.partial(TransformersEngine.create, settings)) as server,
        server.client() as client,
    ):
        info = client.wait_ready()
        print(info)
        client.claim("run-1", fingerprint(str(model), None, False))
        request = GenerateRequest(
            request_id="r",
            adapter_version=0,
            prompts=[[5, 6, 7], [8, 9]],
            sampling=Sampling(n=2, max_tokens=6),
            seeds=[[1, 2], [3, 4]],
        )
        base = client.generate(request)
        adapter = make_random_adapter(model, tmp_path / "sync" / "adapters" / "run-1" / "v1", rank=8)
        (adapter / "README.md").unlink(missing_ok=True)
        sha = write_manifest(adapter, version=1, rank=8)
        print(client.set_adapter(1, sha))
        out = client.generate(request.model_copy(update={"adapter_version": 1}))
        for group, prompt in zip(out.groups, request.prompts):
            for c in group.completions:
                (scored,) = client.score([prompt], [c.ids], 1.0, 1)
                assert scored == pytest.approx(c.logprobs, abs=1e-4)
                (b,) = client.score([prompt], [c.ids], 1.0, 0)
                assert b != pytest.approx(c.logprobs, abs=1e-2)
        assert client.generate(request) == base
        client.clear_adapter()
        client.release()
