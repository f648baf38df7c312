import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from axolotl.cli.streams import SteadyFile, steady_streams, text_over

COMMAND = "from axolotl.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"


def pipe_without_reader() -> int:
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


def test_a_reader_that_is_gone_loses_output_and_nothing_else() -> None:
    descriptor = pipe_without_reader()
    try:
        file = SteadyFile(descriptor)
        assert file.write(b"one") == 3
        assert isinstance(file.problem, BrokenPipeError)
        # Whoever inherits the descriptor is not ended by it either.
        assert os.write(descriptor, b"two") == 3
        file.close()
        os.fstat(descriptor)
    finally:
        os.close(descriptor)


def test_a_full_disk_is_tried_again(tmp_path: Path) -> None:
    descriptor, later = os.open("/dev/full", os.O_WRONLY), os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    try:
        file = SteadyFile(descriptor)
        file.write(b"lost")
        assert file.problem is not None
        os.dup2(later, descriptor)
        file.write(b"kept")
        assert (tmp_path / "log").read_bytes() == b"kept"
    finally:
        os.close(descriptor)
        os.close(later)


def test_a_slow_reader_of_a_non_blocking_pipe_gets_everything() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    data, received = b"x" * 1_000_000, io.BytesIO()

    def read() -> None:
        while part := os.read(read_end, 65_536):
            received.write(part)

    reader = threading.Thread(target=read)
    reader.start()
    file = SteadyFile(write_end)
    assert file.write(data) == len(data)
    os.close(write_end)
    reader.join(timeout=30)
    assert not reader.is_alive() and received.getvalue() == data and file.problem is None
    os.close(read_end)


@pytest.mark.parametrize("write_through", [False, True])
def test_what_the_encoding_lacks_is_escaped(tmp_path: Path, write_through: bool) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    try:
        former = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=write_through)
        stream = text_over(SteadyFile(descriptor), former)
        print("für", "\udcff", file=stream)
        stream.flush()
        assert (tmp_path / "log").read_bytes() == b"f\\xfcr \\udcff\n"
    finally:
        os.close(descriptor)


def test_a_stream_that_somebody_put_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stdout", mine)
    with steady_streams() as stdout:
        print("kept")
        assert stdout is None and sys.stdout is mine
    assert mine.getvalue() == "kept\n"


def axolotl(arguments: str, streams: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$1" -c "$2" {arguments} {streams}', "sh", sys.executable, COMMAND],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "streams", "code"),
    [
        ("--help", ">&-", 0),
        ("--help", "2>&-", 0),
        ("--help", ">&- 2>&-", 0),
        ("--help", "> /dev/full", 9),
        ("--help", "2> /dev/full", 0),
        ("config-schema", "> /dev/full", 9),
        ("check none.yaml", ">&-", 2),
        ("check none.yaml", "2>&-", 2),
        ("check none.yaml", "2> /dev/full", 2),
        ("check none.yaml", "> /dev/full 2>&1", 2),
        ("train none.yaml", ">&- 2>&-", 2),
    ],
)
def test_streams_that_cannot_be_written(arguments: str, streams: str, code: int, tmp_path: Path) -> None:
    done = axolotl(arguments, streams, tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if code and "2>" not in streams:
        assert done.stderr.startswith("ERROR E-")


def test_a_report_that_nobody_reads_leaves_its_code(tmp_path: Path) -> None:
    stderr = pipe_without_reader()
    try:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "check", "none.yaml"], cwd=tmp_path, stderr=stderr, timeout=60
        )
    finally:
        os.close(stderr)
    assert done.returncode == 2


def test_a_path_that_the_encoding_of_the_output_lacks(tmp_path: Path) -> None:
    done = axolotl("check für.yaml", "", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "f\\xfcr.yaml" in done.stderr and "Traceback" not in done.stderr
