from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from peft import PeftModel

from axolotl.core.trainers.grpo.weight_sync.lora_files import LoraFiles
from axolotl.serving.client import ServerClient
from axolotl.serving.wire import CANARY_VERSION, AdapterResponse


class Server:
    """Holds the version it was sent last, and the one before."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def set_adapter(self, version: int, digest: str) -> AdapterResponse:
        self.held = [*self.held[-1:], version]
        return AdapterResponse(
            instance_id="i",
            adapter_version=version,
            manifest_sha256=digest,
            num_modules=4,
            loaded_versions=sorted(self.held),
        )


def test_files_stay_while_the_server_holds_the_version_and_the_canarys_for_good(
    tmp_path: Path, make_policy: Callable[..., PeftModel]
) -> None:
    """A server that is restarted gets the canary again from them."""
    model = make_policy()
    delivery = LoraFiles(lambda: model, cast(ServerClient, Server()), tmp_path)
    for version in (CANARY_VERSION, 1, 2, 3):
        delivered = delivery.deliver(version)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["v2", "v3", f"v{CANARY_VERSION}"])
    assert len(delivered.digest) == 64
