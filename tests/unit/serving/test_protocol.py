"""The protocol suite over the fake engine: the real app and client on a real socket, no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from axolotl.serving.engines.protocol import Engine
from tests.fakes.engine import FAKE_FINGERPRINT, FakeEngine
from tests.support.adapters import publish_fake, publish_fake_weights
from tests.support.live_server import live_server
from tests.support.protocol_suite import ProtocolSuite, Subject


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    sync_dir: Path = tmp_path_factory.mktemp("sync")

    async def create() -> Engine:
        return FakeEngine()

    with live_server(sync_dir, create) as server:
        yield Subject(
            server=server,
            fingerprint=FAKE_FINGERPRINT,
            max_model_len=FakeEngine.max_model_len,
            publish=lambda run_id, version: publish_fake(sync_dir, run_id, version),
            publish_weights=lambda run_id, version: publish_fake_weights(sync_dir, run_id, version),
        )


class TestFakeEngine(ProtocolSuite):
    pass
