"""A server over vLLM passes what every server must."""

from __future__ import annotations

import pytest
import torch

from tests.campaigns import fuzz
from tests.support.protocol_suite import ProtocolSuite, Subject

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
