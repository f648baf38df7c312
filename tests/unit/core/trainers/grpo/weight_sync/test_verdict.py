from __future__ import annotations

import pytest
import torch

from axolotl.core.trainers.grpo.weight_sync.verdict import Expected, name_of, require, require_moved
from axolotl.errors import SyncError
from axolotl.serving.wire import CANARY_VERSION


def logps(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


PUSHED = Expected(3, (7, 9), logps(-1.0, -2.0), {"the base model": logps(-1.02, -2.02)})


def test_versions_have_the_names_that_messages_use() -> None:
    assert [name_of(version) for version in (0, 3, CANARY_VERSION)] == [
        "the base model",
        "policy version 3",
        "the canary",
    ]


def test_what_agrees_is_let_pass() -> None:
    require(PUSHED, logps(-1.01, -2.01), tolerance=0.1, noise=0.01)


def test_the_error_shows_the_numbers_and_what_they_cannot_show() -> None:
    with pytest.raises(SyncError, match="policy version 3: its log-probs of 2 fixed tokens") as caught:
        require(PUSHED, logps(-1.5, -2.5), tolerance=0.1, noise=0.005)
    assert caught.value.why == (
        "0.5 nats from the policy that was pushed, tolerance is 0.1; "
        "the base model cannot be told from it (two right sides are 0.005 nats apart)"
    )
    assert caught.value.details == (
        "log-prob of token 7: server -1.5000, policy version 3 -1.0000, the base model -1.0200",
        "log-prob of token 9: server -2.5000, policy version 3 -2.0000, the base model -2.0200",
    )
    with pytest.raises(SyncError) as caught:
        require(PUSHED, logps(-1.02, -2.02), tolerance=0.1, noise=0.001)
    assert caught.value.why == "0.02 nats from the policy that was pushed, 0 from the base model"


def test_a_server_that_stood_still_is_shown_beside_what_it_said_before() -> None:
    before = Expected(2, (7, 9), logps(-1.1, -2.1), {})
    require_moved(PUSHED, logps(-1.0, -2.0), before, logps(-1.1, -2.1), noise=0.01)
    with pytest.raises(SyncError, match="policy version 3 changed nothing in the server") as caught:
        require_moved(PUSHED, logps(-1.1, -2.1), before, logps(-1.1, -2.1), noise=0.01)
    assert (caught.value.code, caught.value.exit_code) == ("E-SYN-11", 7)
    assert caught.value.details[0] == (
        "log-prob of token 7: server -1.1000, server with policy version 2 -1.1000, "
        "policy version 3 -1.0000, the base model -1.0200"
    )
