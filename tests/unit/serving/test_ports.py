from __future__ import annotations

import os
import socket

import pytest

from axolotl.errors import EnvironmentFault
from axolotl.serving.ports import bind, check_free, program


def test_a_taken_port_names_the_process_that_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault) as problem:
            bind("127.0.0.1", port)
    assert (problem.value.code, problem.value.exit_code) == ("E-ENV-02", 3)
    assert problem.value.what.startswith(f"port {port} is in use by pid {os.getpid()} (")
    assert "vllm.port" in problem.value.do


def test_port_zero_picks_one() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_checking_leaves_the_port_free() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    check_free("127.0.0.1", port)
    bind("127.0.0.1", port).close()


def test_an_address_of_another_machine() -> None:
    with pytest.raises(EnvironmentFault, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            ["python", "-m", "axolotl.cli.main", "vllm-serve", "runs/a.yaml", "--token=secret", "b.yml"],
            "python runs/a.yaml",
        ),
        (["serve", "--key", "secret", "--config=c.yaml"], "python"),
        ([], "python"),
    ],
)
def test_of_a_command_line_only_the_config_is_shown(arguments: list[str], shown: str) -> None:
    assert program("python", arguments) == shown
