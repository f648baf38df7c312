"""Which adapter versions the server holds, and until when.

set(v3) ─ verify manifest ─ make room ─ engine loads eagerly ─ current = v3, previous = v2, v1 dropped when unused
use(v2) ─ counts a request in flight; v2 stays loaded until it ends
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from axolotl.errors import SyncError
from axolotl.serving.engines.protocol import Engine, EngineRejects
from axolotl.serving.manifest import verify_manifest
from axolotl.serving.refusals import Refusal
from axolotl.serving.wire import AdapterResponse

ROOM_TIMEOUT_S = 60.0
_RUN_DIRECTORY = re.compile(r"run-[0-9a-f]{12}")
_VERSION_DIRECTORY = re.compile(r"(\.tmp-)?v[0-9]+")


class AdapterRegistry:
    """Owner of the engine's adapters. Event loop only.

    A version that is refused changes nothing: those loaded before still serve.

    Args:
        root: the directory of all runs' adapters, `<sync_dir>/adapters`.
        max_held: how many versions the engine can hold at once, the one being loaded included (at least 2).
    """

    def __init__(self, engine: Engine, root: Path, *, instance_id: str, max_held: int) -> None:
        assert max_held >= 2
        self._engine = engine
        self._root = root
        self._instance_id = instance_id
        self._max_held = max_held
        self._lock = asyncio.Lock()
        self._freed = asyncio.Condition()
        self._digests: dict[int, str] = {}
        self._num_modules: dict[int, int] = {}
        self._in_flight: Counter[int] = Counter()
        self.current = 0
        self.previous = 0

    @property
    def loaded_versions(self) -> list[int]:
        return sorted(self._digests)

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.total()

    @asynccontextmanager
    async def use(self, version: int) -> AsyncIterator[None]:
        """Hold `version` while a request runs on it. Raises a 409 `Refusal` when it is not held."""
        if version != 0 and version not in self._digests:
            raise Refusal(
                409,
                "E-SRV-13",
                f"adapter version {version} is not held",
                why=f"this server holds {self.loaded_versions or 'no adapter'}, current version {self.current}",
                do="push the adapter again",
            )
        self._in_flight[version] += 1
        try:
            yield
        finally:
            self._in_flight[version] -= 1
            await self._drop_unused()
            async with self._freed:
                self._freed.notify_all()

    async def set(self, run_id: str, version: int, manifest_sha256: str) -> AdapterResponse:
        """Verify, load and serve a published version. Setting the same version and contents again confirms it."""
        async with self._lock:
            if self._digests.get(version) == manifest_sha256:
                self._become(version)
                return self._response()
            if version in self._digests:
                raise Refusal(
                    409,
                    "E-SYN-07",
                    f"adapter version {version} is already loaded with other contents",
                    do="publish changed weights under a new version",
                )
            await self._load(self._root / run_id / f"v{version}", version, manifest_sha256)
            self._become(version)
        await self._drop_unused()
        return self._response()

    async def clear(self) -> AdapterResponse:
        """Go back to the base model; adapters are dropped as their requests end."""
        async with self._lock:
            self.current = self.previous = 0
        await self._drop_unused()
        return self._response()

    async def reset(self, run_id: str) -> None:
        """Forget everything for `run_id`, caches and the published adapters of earlier runs included.

        What becomes of requests in flight is the engine's affair: transformers finishes them first, vLLM aborts them.
        """
        async with self._lock:
            self.current = self.previous = 0
            self._digests.clear()
            self._num_modules.clear()
            await self._engine.reset()
            await asyncio.to_thread(self._remove_other_runs, run_id)

    async def _load(self, directory: Path, version: int, manifest_sha256: str) -> None:
        try:
            manifest = await asyncio.to_thread(verify_manifest, directory, manifest_sha256)
        except SyncError as error:
            raise Refusal.of(error, 409) from error
        if manifest.version != version:
            raise Refusal(409, "E-SYN-02", f"the manifest is of version {manifest.version}, not {version}")
        limit = self._engine.max_lora_rank
        if limit is not None and manifest.rank > limit:
            raise Refusal(
                409,
                "E-SYN-03",
                f"adapter rank {manifest.rank} is above the server's limit {limit}",
                do="restart the server with the config that is being trained",
            )
        await self._make_room()
        try:
            num_modules = await self._engine.load_adapter(version, directory)
        except EngineRejects as error:
            raise Refusal(422, "E-SYN-01", "the engine refused the adapter", why=str(error)) from error
        if num_modules == 0:
            await self._engine.unload_adapter(version)
            raise Refusal(422, "E-SYN-04", "the adapter was loaded but reached no module of the model")
        self._digests[version] = manifest_sha256
        self._num_modules[version] = num_modules

    async def _make_room(self) -> None:
        """Leave room for one more version: the previous one goes first, then wait for requests in flight."""
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                while len(self._digests) >= self._max_held:
                    await self._drop_unused(keep=frozenset({self.current}))
                    if len(self._digests) < self._max_held:
                        return
                    async with self._freed:
                        await self._freed.wait()
        except TimeoutError as error:
            raise Refusal(
                503,
                "E-SYN-08",
                "no room for another adapter version",
                why=f"requests in flight still use {self.loaded_versions}, and the engine holds {self._max_held}",
            ) from error

    async def _drop_unused(self, keep: frozenset[int] | None = None) -> None:
        kept = keep if keep is not None else {self.current, self.previous}
        for version in self.loaded_versions:
            if version in self._digests and version not in kept and not self._in_flight[version]:
                del self._digests[version], self._num_modules[version]
                await self._engine.unload_adapter(version)

    def _remove_other_runs(self, run_id: str) -> None:
        """Nobody can ask for their versions again: the session is another run's now.

        The directory is of the user's choice and may hold other things; only what a trainer made is removed.
        """
        if not self._root.is_dir():
            return
        for directory in self._root.iterdir():
            if directory.name != run_id and _is_published_run(directory):
                shutil.rmtree(directory, ignore_errors=True)

    def _become(self, version: int) -> None:
        if version != self.current:
            self.previous, self.current = self.current, version

    def _response(self) -> AdapterResponse:
        return AdapterResponse(
            instance_id=self._instance_id,
            adapter_version=self.current,
            manifest_sha256=self._digests.get(self.current),
            num_modules=self._num_modules.get(self.current, 0),
            loaded_versions=self.loaded_versions,
        )


def _is_published_run(directory: Path) -> bool:
    """Whether a trainer made it: named like a run, and nothing in it but versions, published or being written."""
    return _is_directory_named(directory, _RUN_DIRECTORY) and all(
        _is_directory_named(entry, _VERSION_DIRECTORY) for entry in directory.iterdir()
    )


def _is_directory_named(path: Path, pattern: re.Pattern[str]) -> bool:
    return pattern.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()
