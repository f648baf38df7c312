"""A server over vLLM passes what every server must."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.campaigns import fuzz, soak
from tests.support.protocol_suite import ProtocolSuite, Subject
from tests.support.running_engine import RunningEngine

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def subject(vllm_subject: Subject) -> Subject:
    return vllm_subject


class TestVLLMServer(ProtocolSuite):
    pass


def test_fuzzed_requests_leave_it_alive(subject: Subject) -> None:
    summary = fuzz.run(subject.server, 300, seed=1, publish=subject.publish)
    assert not summary.problems, summary.problems
    assert summary.count == 300


def test_nothing_piles_up_in_the_engines_processes(
    subject: Subject, shared_vllm: RunningEngine, tiny_adapters: tuple[Path, Path]
) -> None:
    """Stands last: its run is another machine's, and holds the server until the lease is over."""
    (core,) = [process for process in shared_vllm.engine.processes if "EngineCore" in process.name()]
    report = soak.run(subject.server, core, tiny_adapters[0], 60)
    assert not report.failures and report.num_answers >= report.num_syncs, report
    assert len(report.samples) > 40
    assert (report.growth("files"), report.growth("threads")) == (0, 0), report
    # Two, and a third while a request on the oldest ends.
    assert all(sample.versions <= 3 and sample.directories <= 3 for sample in report.samples), report
    assert len(shared_vllm.loop.run(shared_vllm.engine._llm.list_loras())) <= 3
