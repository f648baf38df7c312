from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from axolotl.serving.engines.vllm_plugin import register

CHILD = """
import multiprocessing, time
from axolotl.serving.engines.vllm_plugin import register

def work(connection):
    register()
    connection.send("armed")
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,))
    child.start()
    ours.recv()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_the_server_process_itself_is_left_alone() -> None:
    """This process is nobody's multiprocessing child: a server started in a terminal outlives the terminal."""
    register()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_dies_with_its_parent(tmp_path, method: str) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "parent.py"
    script.write_text(CHILD.format(method=method))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    child.wait(timeout=10)
