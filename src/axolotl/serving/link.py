"""A server that a run has claimed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from axolotl.serving.client import ServerClient


@dataclass(frozen=True)
class ServerLink:
    """client: ready and claimed. directory: this run's place for adapter versions, below the server's `sync_dir`."""

    client: ServerClient
    directory: Path

    @property
    def weights_directory(self) -> Path:
        """This run's place for full weights, beside the one for adapters."""
        return self.directory.parent.parent / "weights" / self.directory.name
