"""`<sync_dir>/server.json`: how a trainer on this machine finds a server's token, and who it is."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from axolotl.errors import EnvironmentFault

SERVER_FILE = "server.json"
TOKEN_VARIABLE = "AXOLOTL_SERVER_TOKEN"


class ServerFile(BaseModel):
    """started: when the process started, in seconds since the epoch; with the pid it names a process for good."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    pid: int
    started: float
    instance_id: str
    token: str

    def is_alive(self) -> bool:
        """Whether that very process runs on this machine, and is not this one."""
        try:
            process = psutil.Process(self.pid)
            is_same = process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return is_same and self.pid != os.getpid()


def new_token() -> str:
    """The token of a server that starts now: from the environment, else 256 random bits."""
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)


def read_token(sync_dir: Path) -> str | None:
    """The token to show: from the environment, else the one the server left in `sync_dir`, else None."""
    if os.environ.get(TOKEN_VARIABLE):
        return os.environ[TOKEN_VARIABLE]
    found = read_server_file(sync_dir)
    return found.token if found else None


def read_server_file(sync_dir: Path) -> ServerFile | None:
    """None when there is none that can be read."""
    try:
        return ServerFile.model_validate_json((sync_dir / SERVER_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write_server_file(sync_dir: Path, content: ServerFile) -> None:
    """Publish it atomically, readable by its owner only. `sync_dir` is made with mode 0700 when absent.

    Raises:
        EnvironmentFault: the directory cannot be made or written to.
    """
    try:
        _write(sync_dir, content)
    except OSError as error:
        raise EnvironmentFault(
            f"vllm.sync_dir {sync_dir} cannot be used",
            code="E-ENV-09",
            why=error.strerror or str(error),
            do="set vllm.sync_dir to a directory that this user may write to",
        ) from error


def _write(sync_dir: Path, content: ServerFile) -> None:
    sync_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = sync_dir / f".{SERVER_FILE}.{content.instance_id}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content.model_dump(), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(sync_dir / SERVER_FILE)


def remove_server_file(sync_dir: Path, instance_id: str) -> None:
    """Remove it when it is still that of `instance_id`."""
    found = read_server_file(sync_dir)
    if found is not None and found.instance_id == instance_id:
        (sync_dir / SERVER_FILE).unlink(missing_ok=True)
