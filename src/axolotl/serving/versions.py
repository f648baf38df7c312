"""Which policy versions the server holds, and until when. Versions come as adapters, or as full weights.

set_adapter(v3) ─ verify manifest ─ make room ─ engine loads eagerly ─ current = v3; the oldest too many goes
set_weights(v3) ─ verify manifest ─ refuse all other versions ─ engine finishes its requests, then replaces ─ only v3
receive_weights(v3)               ─ the same, without files
use(v2)         ─ counts a request in flight; v2 stays loaded until it ends
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from axolotl.errors import AxolotlError, SyncError
from axolotl.serving.engines.protocol import Engine, EngineRejects
from axolotl.serving.manifest import Kind, Manifest, check_unchanged, verify_manifest
from axolotl.serving.refusals import Refusal
from axolotl.serving.run_directories import DIRECTORIES
from axolotl.serving.wire import AdapterResponse

ROOM_TIMEOUT_S = 60.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """digest: of its manifest, or of what was announced where it came without files. num_modules: as in
    `AdapterResponse`."""

    digest: str
    num_modules: int


class PolicyVersions:
    """Owner of the engine's weights. Event loop only.

    A version that is refused changes nothing: those loaded before still serve. A version counts as held until the
    engine has confirmed that it forgot it, but is not used any more from the moment that was asked.

    Args:
        sync_dir: published versions are in its `adapters/<run_id>/` and `weights/<run_id>/`.
        max_held: how many adapters the engine can hold at once, the one being loaded included (at least 2).
    """

    def __init__(self, engine: Engine, sync_dir: Path, *, instance_id: str, max_held: int) -> None:
        assert max_held >= 2
        self._engine = engine
        self._sync_dir = sync_dir
        self._instance_id = instance_id
        self.max_held = max_held
        self._lock = asyncio.Lock()
        self._freed = asyncio.Event()
        self._held: dict[int, Held] = {}
        self._unloads: dict[int, asyncio.Task[None]] = {}
        self._in_flight: Counter[int] = Counter()
        self._own_version = 0  # of the model's own weights: 0 until full weights are pushed
        self._is_replacing = False
        self._recent: list[int] = []  # adapters in the order in which they were set last
        self.current = 0

    @property
    def loaded_versions(self) -> list[int]:
        return sorted(self._held)

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.total()

    def check(self, version: int) -> None:
        """Raise a 409 `Refusal` unless requests for `version` are served now."""
        is_served = version == self._own_version or (version in self._held and version not in self._unloads)
        if is_served and not self._is_replacing:
            return
        if self._is_replacing:
            why = "the weights of the model are being replaced"
        else:
            why = f"this server holds {self.loaded_versions or 'no pushed version'}, current version {self.current}"
        raise Refusal(409, "E-SRV-13", f"policy version {version} is not held", why=why, do="ask for one that it holds")

    @contextmanager
    def use(self, version: int) -> Iterator[None]:
        """Hold `version` while a request runs on it. Raises as `check`."""
        self.check(version)
        self._in_flight[version] += 1
        try:
            yield
        finally:
            self._in_flight[version] -= 1
            self._drop_unused(self._kept(max(2, self.max_held - 1)))
            self._freed.set()

    async def set_adapter(self, run_id: str, version: int, manifest_sha256: str) -> AdapterResponse:
        """Verify, load and serve a published adapter. Setting the same version and contents again confirms it."""
        async with self._lock:
            await self._settled()
            if not self._is_held(version, manifest_sha256):
                await self._load_adapter(run_id, version, manifest_sha256)
            if version in self._recent:
                self._recent.remove(version)
            self._recent.append(version)
            self.current = version
            self._drop_unused(self._kept(max(2, self.max_held - 1)))
            await self._settled()
            return self.response()

    async def set_weights(self, run_id: str, version: int, manifest_sha256: str) -> AdapterResponse:
        """Verify published full weights and replace the model's by them. Afterwards nothing else is held.

        What the engine raises besides `EngineRejects` passes through; no version is served after that.
        """
        async with self._lock:
            await self._settled()
            if not self._is_held(version, manifest_sha256):
                await self._load_weights(run_id, version, manifest_sha256)
            return self.response()

    async def receive_weights(
        self, version: int, digest: str, receive: Callable[[], Awaitable[int]]
    ) -> AdapterResponse:
        """The same for weights that come without files: `receive` replaces the model's by them and says how many there
        were. A version comes once only; who sends it has nobody to send to the second time."""
        async with self._lock:
            await self._settled()
            self.check_new(version)
            await self._replace_weights(version, digest, receive)
            self._is_replacing = False
            return self.response()

    def check_new(self, version: int) -> None:
        """Raise a 409 `Refusal` when `version` is held already."""
        if version in self._held:
            raise Refusal(
                409,
                "E-SYN-07",
                f"policy version {version} is already loaded",
                do="send changed weights under a new version",
            )

    async def clear(self) -> AdapterResponse:
        """Go back to the base model. Adapters are dropped as their requests end; pushed weights at once."""
        async with self._lock:
            if self._own_version != 0:
                await self._to_base()
            self.current = 0
            self._recent.clear()
            self._drop_unused(set())
            await self._settled()
            return self.response()

    async def reset(self) -> None:
        """Forget everything, caches included; the engine gives up requests in flight."""
        async with self._lock:
            await self._settled()
            await self._to_base()

    def _is_held(self, version: int, manifest_sha256: str) -> bool:
        held = self._held.get(version)
        if held is not None and held.digest != manifest_sha256:
            raise Refusal(
                409,
                "E-SYN-07",
                f"policy version {version} is already loaded with other contents",
                do="publish changed weights under a new version",
            )
        return held is not None

    async def _load_adapter(self, run_id: str, version: int, manifest_sha256: str) -> None:
        directory, manifest = await self._verified("adapter", run_id, version, manifest_sha256)
        limit = self._engine.max_lora_rank
        if limit is not None and manifest.rank > limit:
            raise Refusal(
                409,
                "E-SYN-03",
                f"adapter rank {manifest.rank} is above the server's limit {limit}",
                do="restart the server with the config that is being trained",
            )
        if self._own_version != 0:
            raise Refusal(
                409,
                "E-SYN-01",
                "an adapter belongs to the base model",
                why=f"the server holds full weights, version {self._own_version}",
                do="claim the server again, or POST /clear_lora_adapter/",
            )
        await self._make_room()
        try:
            num_modules = await self._engine.load_adapter(version, directory)
        except EngineRejects as error:
            raise Refusal(422, "E-SYN-01", "the engine refused the adapter", why=str(error)) from error
        try:
            if num_modules == 0:
                raise Refusal(422, "E-SYN-04", "the adapter was loaded but reached no module of the model")
            await _check_unchanged(directory, manifest)
        except Refusal:
            await self._engine.unload_adapter(version)
            raise
        self._held[version] = Held(manifest_sha256, num_modules)

    async def _load_weights(self, run_id: str, version: int, manifest_sha256: str) -> None:
        directory, manifest = await self._verified("weights", run_id, version, manifest_sha256)
        await self._replace_weights(version, manifest_sha256, lambda: self._engine.load_weights(version, directory))
        try:
            await _check_unchanged(directory, manifest)
        except Refusal:
            await self._to_base()
            raise
        self._is_replacing = False

    async def _replace_weights(self, version: int, digest: str, replace: Callable[[], Awaitable[int]]) -> None:
        """Leaves every version refused, until the caller has seen that all is well."""
        self._is_replacing = True  # and stays so when the engine breaks
        try:
            num_tensors = await replace()
        except EngineRejects as error:
            self._is_replacing = False
            raise Refusal(422, "E-SYN-01", "the engine refused the weights", why=str(error)) from error
        self._held = {version: Held(digest, num_tensors)}
        self._own_version = self.current = version
        self._recent.clear()

    async def _verified(self, kind: Kind, run_id: str, version: int, manifest_sha256: str) -> tuple[Path, Manifest]:
        directory = self._sync_dir / DIRECTORIES[kind] / run_id / f"v{version}"
        try:
            manifest = await asyncio.to_thread(verify_manifest, directory, manifest_sha256, kind=kind)
        except SyncError as error:
            raise Refusal.of(error, 409) from error
        if manifest.version != version:
            raise Refusal(409, "E-SYN-02", f"the manifest is of version {manifest.version}, not {version}")
        return directory, manifest

    async def _to_base(self) -> None:
        """The engine as it was started. Only the base model's own requests go on meanwhile."""
        self._is_replacing = self._own_version != 0
        self.current = 0
        self._recent.clear()
        self._held.clear()
        await self._engine.reset()
        self._own_version = 0
        self._is_replacing = False

    async def _make_room(self) -> None:
        """Leave room for one more adapter: the oldest ones go first, then wait for requests in flight."""
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                while len(self._held) >= self.max_held:
                    self._freed.clear()
                    self._drop_unused(self._kept(self.max_held - 1))
                    await self._settled()
                    if len(self._held) >= self.max_held:
                        await self._freed.wait()
        except TimeoutError as error:
            raise Refusal(
                503,
                "E-SYN-08",
                "no room for another adapter version",
                why=f"requests in flight still use {self.loaded_versions}, and the engine holds {self.max_held}",
            ) from error

    def _kept(self, count: int) -> set[int]:
        """The newest: completions may still be ordered of any that the trainer's prefetching reaches back to."""
        return set(self._recent[-count:])

    def _drop_unused(self, kept: set[int]) -> None:
        """Begin to unload the adapters that nobody needs; `_settled` waits for it."""
        if self._is_replacing:
            return
        for version in self.loaded_versions:
            is_needed = version in kept or version == self._own_version or self._in_flight[version] > 0
            if not is_needed and version not in self._unloads:
                self._unloads[version] = asyncio.ensure_future(self._unload(version))

    async def _unload(self, version: int) -> None:
        try:
            await self._engine.unload_adapter(version)
            self._held.pop(version, None)
        except (AxolotlError, EngineRejects) as error:
            # It is still held, says so, and is dropped with the next one.
            _LOG.warning("policy version %d was not unloaded: %s", version, error)
        finally:
            del self._unloads[version]
            self._freed.set()

    async def _settled(self) -> None:
        while self._unloads:
            await asyncio.wait(self._unloads.values())

    def response(self) -> AdapterResponse:
        """What is served now."""
        held = self._held.get(self.current)
        return AdapterResponse(
            instance_id=self._instance_id,
            adapter_version=self.current,
            manifest_sha256=held.digest if held else None,
            num_modules=held.num_modules if held else 0,
            loaded_versions=self.loaded_versions,
        )


async def _check_unchanged(directory: Path, manifest: Manifest) -> None:
    try:
        await asyncio.to_thread(check_unchanged, directory, manifest)
    except SyncError as error:
        raise Refusal.of(error, 409) from error
