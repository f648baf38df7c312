"""Which versions the versions keeps, and for how long."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from axolotl.errors import ServerError
from axolotl.serving.refusals import Refusal
from axolotl.serving.versions import PolicyVersions
from tests.fakes.engine import FakeEngine
from tests.support.adapters import publish_fake, publish_fake_weights

Body = Callable[[PolicyVersions, FakeEngine, Path], Awaitable[None]]


def scenario(tmp_path: Path, body: Body, *, max_held: int = 3) -> None:
    async def run() -> None:
        engine = FakeEngine()
        versions = PolicyVersions(engine, tmp_path, instance_id="a", max_held=max_held)
        await asyncio.wait_for(body(versions, engine, tmp_path), 10)

    asyncio.run(run())


async def load(versions: PolicyVersions, sync_dir: Path, *numbers: int) -> None:
    for version in numbers:
        await versions.set_adapter("run", version, publish_fake(sync_dir, "run", version))


async def turns() -> None:
    """Let every task that can go on do so."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_current_and_previous_stay(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2, 3, 4)
        assert versions.loaded_versions == [3, 4]
        assert engine.calls == ["load v1", "load v2", "load v3", "unload v1", "load v4", "unload v2"]

    scenario(tmp_path, body)


def test_a_request_keeps_its_version(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1)
        with versions.use(1):
            await load(versions, sync_dir, 2, 3)
            assert versions.loaded_versions == [1, 2, 3]
            assert versions.num_in_flight == 1
        await turns()
        assert versions.loaded_versions == [2, 3]
        assert engine.calls[-1] == "unload v1"

    scenario(tmp_path, body)


def test_a_version_that_is_not_held_is_refused(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2, 3)
        with pytest.raises(Refusal, match="version 1 is not held") as refusal, versions.use(1):
            pass
        assert refusal.value.status == 409
        with versions.use(0):
            pass

    scenario(tmp_path, body)


def test_the_engine_never_holds_more_than_it_can(tmp_path: Path) -> None:
    """With room for two, loading v3 drops the previous one first."""

    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2, 3)
        assert engine.calls == ["load v1", "load v2", "unload v1", "load v3"]

    scenario(tmp_path, body, max_held=2)


def test_loading_waits_for_requests_that_fill_the_room(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2)
        with versions.use(1):
            pushing = asyncio.create_task(load(versions, sync_dir, 3))
            await turns()
            assert versions.loaded_versions == [1, 2] and not pushing.done()
        await pushing
        assert versions.loaded_versions == [2, 3]

    scenario(tmp_path, body, max_held=2)


@pytest.mark.parametrize(
    ("rank", "weights", "code", "status"), [(17, None, "E-SYN-03", 409), (8, b"bad", "E-SYN-01", 422)]
)
def test_a_refused_version_changes_nothing(
    tmp_path: Path, rank: int, weights: bytes | None, code: str, status: int
) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2)
        digest = publish_fake(sync_dir, "run", 3, rank=rank, weights=weights)
        with pytest.raises(Refusal) as refusal:
            await versions.set_adapter("run", 3, digest)
        assert (refusal.value.body.code, refusal.value.status) == (code, status)
        assert (versions.current, versions.loaded_versions) == (2, [1, 2])

    scenario(tmp_path, body)


def test_an_adapter_that_reaches_nothing_is_refused(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        engine.num_modules = 0
        with pytest.raises(Refusal, match="reached no module"):
            await load(versions, sync_dir, 1)
        assert engine.calls == ["load v1", "unload v1"] and versions.current == 0

    scenario(tmp_path, body)


def test_a_directory_of_another_version_is_refused(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        digest = publish_fake(sync_dir, "run", 1)
        (sync_dir / "adapters" / "run" / "v1").rename(sync_dir / "adapters" / "run" / "v2")
        with pytest.raises(Refusal, match="of version 1, not 2"):
            await versions.set_adapter("run", 2, digest)
        assert engine.calls == []

    scenario(tmp_path, body)


def test_a_loaded_version_cannot_change(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1)
        with pytest.raises(Refusal, match="other contents"):
            await versions.set_adapter("run", 1, "0" * 64)

    scenario(tmp_path, body)


def test_reset_and_clear_forget(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2)
        answer = await versions.clear()
        assert (answer.adapter_version, answer.loaded_versions, answer.num_modules) == (0, [], 0)
        await load(versions, sync_dir, 3)
        await versions.reset()
        assert (versions.current, versions.loaded_versions) == (0, [])
        assert engine.calls[-1] == "reset"

    scenario(tmp_path, body)


def test_a_request_that_outlives_a_reset_drops_nothing_twice(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1)
        with versions.use(1):
            await versions.reset()
        assert "unload v1" not in engine.calls and versions.num_in_flight == 0

    scenario(tmp_path, body)


def test_a_version_is_held_until_the_engine_has_forgotten_it(tmp_path: Path) -> None:
    """Its directory may be deleted once it is not among the loaded ones, and until then the engine may read it."""

    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2)
        engine.unload_gate.clear()
        pushing = asyncio.create_task(load(versions, sync_dir, 3))
        while 3 not in versions.loaded_versions:
            await asyncio.sleep(0)
        await turns()
        assert versions.loaded_versions == [1, 2, 3] and not pushing.done()
        with pytest.raises(Refusal, match="version 1 is not held"), versions.use(1):
            pass
        engine.unload_gate.set()
        await pushing
        assert versions.loaded_versions == [2, 3]

    scenario(tmp_path, body)


def test_a_version_that_could_not_be_unloaded_goes_with_the_next(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2, 3)
        engine.unload_fault = ServerError("no answer", code="E-SRV-05")
        await load(versions, sync_dir, 4)
        assert versions.loaded_versions == [1, 2, 3, 4]
        engine.unload_fault = None
        await load(versions, sync_dir, 5)
        assert versions.loaded_versions == [3, 4, 5]

    scenario(tmp_path, body, max_held=4)


def test_the_newest_stay_as_many_as_prefetching_may_ask_for(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, *range(1, 8))
        assert versions.loaded_versions == [4, 5, 6, 7]

    scenario(tmp_path, body, max_held=5)


def test_any_number_is_a_version_of_its_own(tmp_path: Path) -> None:
    """The proof of sync pushes its canary under a number that no training step reaches, then training begins at 1."""

    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 2**30, 1, 2)
        assert (versions.current, versions.loaded_versions) == (2, [1, 2])
        assert engine.calls[-1] == f"unload v{2**30}"

    scenario(tmp_path, body)


def test_files_that_change_while_the_engine_reads_them_are_refused(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1)
        digest = publish_fake(sync_dir, "run", 2)
        weights = sync_dir / "adapters" / "run" / "v2" / "adapter_model.safetensors"
        engine.on_load = lambda: weights.write_bytes(b"others")
        with pytest.raises(Refusal) as refusal:
            await versions.set_adapter("run", 2, digest)
        assert refusal.value.body.code == "E-SYN-02"
        assert (versions.current, versions.loaded_versions, engine.calls[-1]) == (1, [1], "unload v2")

    scenario(tmp_path, body)


# Full weights


def test_full_weights_are_the_only_version(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await load(versions, sync_dir, 1, 2)
        answer = await versions.set_weights("run", 3, publish_fake_weights(sync_dir, "run", 3))
        assert (answer.adapter_version, answer.num_modules, answer.loaded_versions) == (3, 4, [3])
        with versions.use(3):
            pass
        for earlier in (0, 1, 2):
            with pytest.raises(Refusal, match=f"version {earlier} is not held"), versions.use(earlier):
                pass
        assert not [call for call in engine.calls if call.startswith("unload")], "the engine drops them by itself"

    scenario(tmp_path, body)


def test_nothing_is_served_from_the_moment_the_weights_are_replaced(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        engine.load_gate.clear()
        with versions.use(0):
            digest = publish_fake_weights(sync_dir, "run", 1)
            pushing = asyncio.create_task(versions.set_weights("run", 1, digest))
            await is_refused(versions, 0)
            with pytest.raises(Refusal, match="version 1 is not held"), versions.use(1):
                pass
        engine.load_gate.set()
        await pushing
        with versions.use(1):
            pass

    scenario(tmp_path, body)


@pytest.mark.parametrize(("weights", "digest", "code"), [(b"bad", None, "E-SYN-01"), (None, "0" * 64, "E-SYN-02")])
def test_refused_weights_change_nothing(tmp_path: Path, weights: bytes | None, digest: str | None, code: str) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await versions.set_weights("run", 1, publish_fake_weights(sync_dir, "run", 1))
        published = publish_fake_weights(sync_dir, "run", 2, weights=weights)
        with pytest.raises(Refusal) as refusal:
            await versions.set_weights("run", 2, digest or published)
        assert refusal.value.body.code == code
        assert (versions.current, versions.loaded_versions) == (1, [1])
        with versions.use(1):
            pass

    scenario(tmp_path, body)


def test_weights_that_break_the_engine_leave_no_version(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        engine.breaks_on_load = True
        with pytest.raises(ServerError):
            await versions.set_weights("run", 1, publish_fake_weights(sync_dir, "run", 1))
        for version in (0, 1):
            with pytest.raises(Refusal), versions.use(version):
                pass

    scenario(tmp_path, body)


def test_the_same_weights_again_are_confirmed_and_others_refused(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        digest = publish_fake_weights(sync_dir, "run", 1)
        assert await versions.set_weights("run", 1, digest) == await versions.set_weights("run", 1, digest)
        assert engine.calls == ["weights v1"]
        with pytest.raises(Refusal, match="other contents"):
            await versions.set_weights("run", 1, "0" * 64)

    scenario(tmp_path, body)


@pytest.mark.parametrize("way_back", ["clear", "reset"])
def test_the_base_model_comes_back(tmp_path: Path, way_back: str) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        await versions.set_weights("run", 1, publish_fake_weights(sync_dir, "run", 1))
        with pytest.raises(Refusal, match="belongs to the base model"):
            await load(versions, sync_dir, 2)
        await (versions.clear() if way_back == "clear" else versions.reset())
        assert (versions.current, versions.loaded_versions, engine.calls[-1]) == (0, [], "reset")
        with versions.use(0):
            pass
        await versions.set_adapter("run", 2, digest_of(sync_dir, 2))

    scenario(tmp_path, body)


def test_weights_that_change_while_the_engine_reads_them_are_taken_back(tmp_path: Path) -> None:
    async def body(versions: PolicyVersions, engine: FakeEngine, sync_dir: Path) -> None:
        digest = publish_fake_weights(sync_dir, "run", 1)
        weights = sync_dir / "weights" / "run" / "v1" / "model.safetensors"
        engine.on_load = lambda: weights.write_bytes(b"others")
        with pytest.raises(Refusal) as refusal:
            await versions.set_weights("run", 1, digest)
        assert refusal.value.body.code == "E-SYN-02"
        assert (versions.current, versions.loaded_versions, engine.calls[-1]) == (0, [], "reset")

    scenario(tmp_path, body)


async def is_refused(versions: PolicyVersions, version: int) -> None:
    """Returns once requests for `version` are."""
    while True:
        try:
            versions.check(version)
        except Refusal:
            return
        await asyncio.sleep(0)


def digest_of(sync_dir: Path, version: int) -> str:
    return hashlib.sha256((sync_dir / "adapters" / "run" / f"v{version}" / "manifest.json").read_bytes()).hexdigest()
