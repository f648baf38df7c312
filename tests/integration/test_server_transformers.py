"""The protocol and option suites over the transformers engine with a tiny random model."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from axolotl.serving.engines.protocol import EngineSettings
from axolotl.serving.engines.transformers import TransformersEngine
from axolotl.serving.fingerprint import fingerprint
from tests.support.adapters import publish_other_weights, publish_random
from tests.support.live_server import live_server
from tests.support.option_suite import OptionSuite
from tests.support.protocol_suite import ProtocolSuite, Subject
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sync_dir = tmp_path_factory.mktemp("sync")
    model = make_tiny_model(tmp_path_factory.mktemp("model"))
    settings = EngineSettings(
        model=str(model),
        revision=None,
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_lora_rank=8,
        max_loras=3,
    )
    with live_server(sync_dir, functools.partial(TransformersEngine.create, settings)) as server:
        yield Subject(
            server=server,
            fingerprint=fingerprint(str(model), None, False),
            max_model_len=128,
            publish=lambda run_id, version: publish_random(sync_dir, run_id, version, model),
            publish_weights=lambda run_id, version: publish_other_weights(sync_dir, run_id, version),
        )
    torch.set_num_threads(threads)


class TestTransformersEngine(ProtocolSuite):
    pass


class TestTransformersOptions(OptionSuite):
    pass
