"""Who may have the server: rules over a clock and a process table made by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from axolotl.serving.processes import ProcessTable
from axolotl.serving.refusals import Refusal
from axolotl.serving.run_directories import RunDirectories
from axolotl.serving.session import LEASE_S, Session
from axolotl.serving.versions import PolicyVersions
from axolotl.serving.wire import Sampling, SessionRequest
from tests.fakes.engine import FAKE_FINGERPRINT, FakeEngine


class World:
    """One session in namespace `here`; `processes` maps the pids that live there to their start times. Every machine
    has the same host name."""

    def __init__(self, tmp_path: Path) -> None:
        self.now = 0.0
        self.processes = {10: 1, 20: 2}
        self.engine = FakeEngine()
        versions = PolicyVersions(self.engine, tmp_path, instance_id="a", max_held=3)
        table = ProcessTable("here", lambda pid: self.processes.get(pid))
        directories = RunDirectories(tmp_path, table, now=lambda: self.now)
        self.session = Session(versions, self.engine, directories, clock=lambda: self.now, processes=table)

    def claim(self, run_id: str, pid: int, *, place: str = "here", **options: object) -> None:
        request = SessionRequest(
            run_id=run_id,
            host="node",
            pid=pid,
            namespace=place,
            **{"fingerprint": FAKE_FINGERPRINT, **options},
        )
        asyncio.run(self.session.handle(request))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_live_process_keeps_it_however_long_it_is_silent(world: World) -> None:
    world.claim("first", 10)
    world.now = 10_000
    with pytest.raises(Refusal, match="in use by run first") as refusal:
        world.claim("second", 20)
    assert refusal.value.body.why == "host node, pid 10, last seen 10000 s ago"
    assert world.session.run_id == "first"


def test_a_dead_process_loses_it_at_once(world: World) -> None:
    world.claim("first", 10)
    del world.processes[10]
    world.claim("second", 20)
    assert world.session.run_id == "second"


def test_a_pid_that_was_given_to_another_process_is_dead(world: World) -> None:
    world.claim("first", 10)
    world.processes[10] = 99
    world.claim("second", 20)
    assert world.session.run_id == "second"


def test_a_holder_elsewhere_keeps_it_for_as_long_as_its_lease(world: World) -> None:
    world.claim("first", 10, place="there")
    world.now = 50
    world.claim("first", 10, place="there", action="renew")
    world.now = 50 + LEASE_S - 1
    with pytest.raises(Refusal):
        world.claim("second", 20)
    assert world.session.run_id == "first"
    world.now = 50 + LEASE_S + 1
    assert world.session.run_id is None
    world.claim("second", 20)
    assert world.session.run_id == "second"


@pytest.mark.parametrize("place", ["there", ""])
def test_the_first_process_of_another_container_is_another_run(world: World, place: str) -> None:
    """Host name and pid are equal, and the pid is nobody's, or somebody else's, here."""
    world.processes[1] = 5
    world.claim("first", 1, place=place)
    with pytest.raises(Refusal, match="in use by run first"):
        world.claim("second", 1, place="elsewhere")
    with pytest.raises(Refusal, match="in use by run first"):
        world.claim("second", 1, place=place)
    del world.processes[1]
    assert world.session.run_id == "first", "what ends here says nothing about it"
    with pytest.raises(Refusal, match="in use by run first"):
        world.claim("second", 1)
    world.now = LEASE_S + 1
    world.claim("second", 1)
    assert world.session.run_id == "second"


def test_a_process_that_cannot_be_seen_is_not_dead(world: World) -> None:
    """Of this very namespace, but hidden from us, as mount options of /proc can do."""
    world.claim("first", 30)
    with pytest.raises(Refusal, match="in use by run first"):
        world.claim("second", 20)


def test_a_request_that_runs_is_a_sign_of_life(world: World) -> None:
    world.claim("first", 10, place="there")
    with world.session.request("first"):
        world.now = 10 * LEASE_S
        with pytest.raises(Refusal, match="in use by run first"):
            world.claim("second", 20)
    world.now += LEASE_S - 1
    assert world.session.run_id == "first"


def test_a_run_that_was_silent_comes_back_unless_another_took_the_server(world: World) -> None:
    world.claim("first", 10, place="there")
    world.now = 10 * LEASE_S
    with world.session.request("first"):
        pass
    assert world.session.run_id == "first"
    world.now += 10 * LEASE_S
    world.claim("second", 20)
    with pytest.raises(Refusal, match="does not hold") as refusal, world.session.request("first"):
        pass
    assert refusal.value.body.why == "it is held by second"
    with pytest.raises(Refusal, match="does not hold"):
        world.claim("first", 10, place="there", action="renew")


def test_a_dead_holder_is_shown_to_nobody(world: World) -> None:
    world.claim("first", 10)
    del world.processes[10]
    assert world.session.run_id is None


def test_another_model_is_refused_with_the_fingerprints_of_both(world: World) -> None:
    other = FAKE_FINGERPRINT.model_copy(update={"tokenizer": "f" * 64, "base_model": "theirs"})
    with pytest.raises(Refusal, match="the config trains theirs") as refusal:
        world.claim("first", 10, fingerprint=other)
    why = refusal.value.body.why
    assert "tokenizer (the same id means different tokens)" in why
    assert "Server: config c1, tokenizer t1" in why and f"Trainer: config c1, tokenizer {'f' * 12}," in why
    assert world.session.run_id is None and world.engine.calls == []


def test_sampling_that_the_engine_does_not_support_is_refused_before_anything_changes(world: World) -> None:
    world.claim("first", 10)
    sampling = Sampling(max_tokens=4, extra={"no_such_option": 1})
    with pytest.raises(Refusal, match="no_such_option") as refusal:
        world.claim("first", 10, sampling=sampling)
    assert (refusal.value.status, refusal.value.body.code) == (422, "E-SRV-19")
    assert world.session.run_id == "first" and world.engine.calls == ["reset"]
    world.claim("first", 10, sampling=Sampling(max_tokens=4))


def test_the_same_process_may_start_another_run_and_gives_up_the_first(world: World, tmp_path: Path) -> None:
    first, second, third = (f"run-{number:012x}" for number in (1, 2, 3))
    for run_id, pid in ((first, 10), (second, 10)):
        world.claim(run_id, pid)
        (tmp_path / "adapters" / run_id / "v1").mkdir(parents=True)
        assert world.session.run_id == run_id
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [second]
    world.claim(second, 10, action="release")
    world.claim(third, 20)
    assert list((tmp_path / "adapters").iterdir()) == []


def test_a_new_run_resets_and_a_renewal_does_so_only_when_asked(world: World) -> None:
    world.claim("first", 10)
    world.claim("first", 10, action="renew")
    assert world.engine.calls == ["reset"]
    world.claim("first", 10)
    assert world.engine.calls == ["reset", "reset"]


def test_only_the_holder_releases(world: World) -> None:
    world.claim("first", 10)
    world.claim("second", 20, action="release")
    assert world.session.run_id == "first"
    world.claim("first", 10, action="release")
    assert world.session.run_id is None
    world.claim("second", 20)
