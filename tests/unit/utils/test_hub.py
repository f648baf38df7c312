from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from axolotl.utils.hub import hub_problem, looks_like_path


def test_offline_is_the_first_answer() -> None:
    assert hub_problem() == "HF_HUB_OFFLINE is set"


def test_an_unreachable_hub_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        started = time.monotonic()
        problem = hub_problem()
    assert problem is not None and "cannot be reached" in problem and "127.0.0.1" in problem
    assert time.monotonic() - started < 5


def test_a_hub_that_answers_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_problem() is None
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("text", "is_path"),
    [("openai/gsm8k", False), ("gpt2", False), ("./model", True), ("/m/x", True), ("~/m", True), ("a/b/c", True)],
)
def test_paths_and_hub_names(text: str, is_path: bool) -> None:
    assert looks_like_path(text) is is_path
