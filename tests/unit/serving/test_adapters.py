"""Which versions the registry keeps, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from axolotl.serving.adapters import AdapterRegistry
from axolotl.serving.refusals import Refusal
from tests.fakes.engine import FakeEngine
from tests.support.adapters import publish_fake

OLD_RUN, NEW_RUN = "run-0123456789ab", "run-ba9876543210"

Body = Callable[[AdapterRegistry, FakeEngine, Path], Awaitable[None]]


def scenario(tmp_path: Path, body: Body, *, max_held: int = 3) -> None:
    async def run() -> None:
        engine = FakeEngine()
        registry = AdapterRegistry(engine, tmp_path / "adapters", instance_id="a", max_held=max_held)
        await asyncio.wait_for(body(registry, engine, tmp_path), 10)

    asyncio.run(run())


async def load(registry: AdapterRegistry, sync_dir: Path, *versions: int) -> None:
    for version in versions:
        await registry.set("run", version, publish_fake(sync_dir, "run", version))


def test_current_and_previous_stay(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1, 2, 3, 4)
        assert registry.loaded_versions == [3, 4]
        assert engine.calls == ["load v1", "load v2", "load v3", "unload v1", "load v4", "unload v2"]

    scenario(tmp_path, body)


def test_a_request_keeps_its_version(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1)
        async with registry.use(1):
            await load(registry, sync_dir, 2, 3)
            assert registry.loaded_versions == [1, 2, 3]
            assert registry.num_in_flight == 1
        assert registry.loaded_versions == [2, 3]
        assert engine.calls[-1] == "unload v1"

    scenario(tmp_path, body)


def test_a_version_that_is_not_held_is_refused(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1, 2, 3)
        with pytest.raises(Refusal, match="version 1 is not held") as refusal:
            async with registry.use(1):
                pass
        assert refusal.value.status == 409
        async with registry.use(0):
            pass

    scenario(tmp_path, body)


def test_the_engine_never_holds_more_than_it_can(tmp_path: Path) -> None:
    """With room for two, loading v3 drops the previous one first."""

    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1, 2, 3)
        assert engine.calls == ["load v1", "load v2", "unload v1", "load v3"]

    scenario(tmp_path, body, max_held=2)


def test_loading_waits_for_requests_that_fill_the_room(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1, 2)
        async with registry.use(1):
            pushing = asyncio.create_task(load(registry, sync_dir, 3))
            for _ in range(100):
                await asyncio.sleep(0)
            assert registry.loaded_versions == [1, 2] and not pushing.done()
        await pushing
        assert registry.loaded_versions == [2, 3]

    scenario(tmp_path, body, max_held=2)


@pytest.mark.parametrize(
    ("rank", "weights", "code", "status"), [(17, None, "E-SYN-03", 409), (8, b"bad", "E-SYN-01", 422)]
)
def test_a_refused_version_changes_nothing(
    tmp_path: Path, rank: int, weights: bytes | None, code: str, status: int
) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1, 2)
        digest = publish_fake(sync_dir, "run", 3, rank=rank, weights=weights)
        with pytest.raises(Refusal) as refusal:
            await registry.set("run", 3, digest)
        assert (refusal.value.body.code, refusal.value.status) == (code, status)
        assert (registry.current, registry.loaded_versions) == (2, [1, 2])

    scenario(tmp_path, body)


def test_an_adapter_that_reaches_nothing_is_refused(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        engine.num_modules = 0
        with pytest.raises(Refusal, match="reached no module"):
            await load(registry, sync_dir, 1)
        assert engine.calls == ["load v1", "unload v1"] and registry.current == 0

    scenario(tmp_path, body)


def test_a_directory_of_another_version_is_refused(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        digest = publish_fake(sync_dir, "run", 1)
        (sync_dir / "adapters" / "run" / "v1").rename(sync_dir / "adapters" / "run" / "v2")
        with pytest.raises(Refusal, match="of version 1, not 2"):
            await registry.set("run", 2, digest)
        assert engine.calls == []

    scenario(tmp_path, body)


def test_a_loaded_version_cannot_change(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1)
        with pytest.raises(Refusal, match="other contents"):
            await registry.set("run", 1, "0" * 64)

    scenario(tmp_path, body)


def test_reset_and_clear_forget(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1, 2)
        answer = await registry.clear()
        assert (answer.adapter_version, answer.loaded_versions, answer.num_modules) == (0, [], 0)
        await load(registry, sync_dir, 3)
        await registry.reset("run")
        assert (registry.current, registry.loaded_versions) == (0, [])
        assert engine.calls[-1] == "reset"

    scenario(tmp_path, body)


def test_a_request_that_outlives_a_reset_drops_nothing_twice(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        await load(registry, sync_dir, 1)
        async with registry.use(1):
            await registry.reset("run")
        assert "unload v1" not in engine.calls and registry.num_in_flight == 0

    scenario(tmp_path, body)


def test_a_new_run_takes_the_place_of_the_adapters_before_it(tmp_path: Path) -> None:
    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        published = sync_dir / "adapters"
        for run_id in (OLD_RUN, NEW_RUN):
            publish_fake(sync_dir, run_id, 1)
        (published / OLD_RUN / ".tmp-v2").mkdir()
        await registry.reset(NEW_RUN)
        assert [item.name for item in published.iterdir()] == [NEW_RUN]

    scenario(tmp_path, body)


@pytest.mark.parametrize(
    "kept",
    [
        "my-adapters/v1/weights",
        "run-0123456789ab-copy/v1/weights",
        "run-0123456789ab/notes.txt",
        "run-0123456789ab/v1-best/weights",
        "run-0123456789ab/v2",
    ],
)
def test_what_no_trainer_made_is_never_removed(tmp_path: Path, kept: str) -> None:
    """Each is a file: `v2` too, where a trainer writes directories only."""

    async def body(registry: AdapterRegistry, engine: FakeEngine, sync_dir: Path) -> None:
        file = sync_dir / "adapters" / kept
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        (sync_dir / "adapters" / "run-ffffffffffff").symlink_to(file.parent)
        await registry.reset(NEW_RUN)
        assert file.read_text() == "mine"

    scenario(tmp_path, body)
